#include "ops/caching_allocator.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <thread>

namespace lockstep {
namespace {

constexpr std::size_t kNoLimit = std::size_t{1} << 40;

// Never destroyed, as the one under LibTorch: threads keep heaps of it until they end.
CachingAllocator& make_allocator(std::size_t cache_limit = kNoLimit) { return *new CachingAllocator(cache_limit); }

TEST(CachingAllocator, BlocksAreAlignedAndLargeEnough) {
  auto& allocator = make_allocator();
  for (std::size_t bytes = 1; bytes < (1 << 22); bytes = bytes * 9 / 7 + 1) {
    void* data = allocator.allocate(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % 64, 0U);
    std::memset(data, 1, bytes);
    CachingAllocator::deallocate(data);
  }
}

TEST(CachingAllocator, AtMostAQuarterIsUnused) {
  for (std::size_t bytes = 256; bytes < (std::size_t{1} << 30); bytes = bytes * 5 / 4 + 64) {
    auto& allocator = make_allocator(0);
    void* data = allocator.allocate(bytes);
    const auto reserved = allocator.stats().reserved_bytes;
    EXPECT_GE(reserved, bytes);
    EXPECT_LE(reserved, bytes + bytes / 4 + 64) << bytes;
    CachingAllocator::deallocate(data);
  }
}

TEST(CachingAllocator, AFreedBlockServesTheNextOfItsSize) {
  auto& allocator = make_allocator();
  void* first = allocator.allocate(1 << 20);
  CachingAllocator::deallocate(first);
  EXPECT_EQ(allocator.stats().cached_bytes, std::size_t{1} << 20);
  EXPECT_EQ(allocator.allocate(1 << 20), first);
  EXPECT_EQ(allocator.stats().reserved_bytes, std::size_t{1} << 20);
  EXPECT_EQ(allocator.stats().cached_bytes, 0U);
}

TEST(CachingAllocator, ABlockFreedByAnotherThreadGoesHome) {
  auto& allocator = make_allocator();
  void* data = allocator.allocate(4096);
  std::jthread([data] { CachingAllocator::deallocate(data); }).join();
  EXPECT_EQ(allocator.allocate(4096), data);
}

TEST(CachingAllocator, AThreadInheritsTheBlocksOfOneThatEnded) {
  auto& allocator = make_allocator();
  void* data = nullptr;
  std::jthread([&] { CachingAllocator::deallocate(data = allocator.allocate(4096)); }).join();
  std::jthread([&] { EXPECT_EQ(allocator.allocate(4096), data); }).join();
}

TEST(CachingAllocator, KeepsNoMoreThanItsLimit) {
  auto& allocator = make_allocator(10'000);
  void* small = allocator.allocate(8192);
  void* large = allocator.allocate(8192);
  CachingAllocator::deallocate(small);
  CachingAllocator::deallocate(large);
  EXPECT_EQ(allocator.stats().cached_bytes, 8192U);
  EXPECT_EQ(allocator.stats().reserved_bytes, 8192U);
}

TEST(CachingAllocator, LargeBlocksBeyondTheLimitLoseTheirPagesAndServeAgain) {
  auto& allocator = make_allocator(1 << 20);
  constexpr std::size_t kBytes = 1 << 22;
  auto* first = static_cast<char*>(allocator.allocate(kBytes));
  std::memset(first, 7, kBytes);
  CachingAllocator::deallocate(first);
  EXPECT_EQ(allocator.stats().reserved_bytes, 0U);
  EXPECT_EQ(allocator.stats().cached_bytes, 0U);
  auto* again = static_cast<char*>(allocator.allocate(kBytes));
  EXPECT_EQ(again, first);
  EXPECT_EQ(again[kBytes / 2], 0) << "its pages were not given back";
  EXPECT_EQ(allocator.stats().reserved_bytes, kBytes);
}

TEST(CachingAllocator, RefusesWhatNoMachineHas) {
  auto& allocator = make_allocator();
  EXPECT_THROW(allocator.allocate(std::size_t{1} << 46), std::bad_alloc);
}

TEST(CachingAllocator, ThreadsThatPassBlocksAroundNeverShareOne) {
  auto& allocator = make_allocator();
  std::array<std::atomic<std::uint64_t*>, 16> mailbox{};
  const auto work = [&](std::uint64_t tag) {
    for (std::uint64_t round = 0; round < 20000; ++round) {
      auto* data = static_cast<std::uint64_t*>(allocator.allocate(64 * (1 + round % 5)));
      *data = tag << 32 | round;
      auto* other = mailbox[round % mailbox.size()].exchange(data);
      if (other == nullptr) continue;
      EXPECT_NE(*other, 0U);
      *other = 0;
      CachingAllocator::deallocate(other);
    }
  };
  std::jthread one(work, 1);
  std::jthread two(work, 2);
  one.join();
  two.join();
  for (auto& slot : mailbox) CachingAllocator::deallocate(slot.load());
  EXPECT_EQ(allocator.stats().cached_bytes, allocator.stats().reserved_bytes);
}

TEST(CachingAllocator, ServesLibTorchsTensors) {
  const auto tensor = torch::empty({1 << 20});
  EXPECT_GE(memory_stats().reserved_bytes - memory_stats().cached_bytes, tensor.nbytes());
  EXPECT_EQ(tensor.storage().data_ptr().get_deleter(), &CachingAllocator::deallocate);
}

}  // namespace
}  // namespace lockstep
