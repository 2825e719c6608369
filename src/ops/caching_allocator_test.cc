#include "ops/caching_allocator.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "base/process.h"

namespace lockstep::ops {
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

// A program that frees 40 % of the memory and takes 70 % in other sizes, in another thread, while a third one idles.
TEST(CachingAllocator, SizesThatDiedMakeRoomForOthers) {
  constexpr std::size_t kAll = std::size_t{1} << 28;
  for (const std::size_t dead : {std::size_t{60'000}, std::size_t{1} << 20, std::size_t{1} << 26}) {
    auto& allocator = *new CachingAllocator(kAll / 2, kAll / 4 * 3);
    const auto take = [&](std::size_t bytes, std::size_t percent) {
      std::vector<void*> blocks;
      for (std::size_t taken = 0; taken + bytes <= kAll / 100 * percent; taken += bytes) {
        blocks.push_back(allocator.allocate(bytes));
        EXPECT_LE(allocator.stats().reserved_bytes, kAll);
      }
      return blocks;
    };
    const auto give_back = [](const std::vector<void*>& blocks) {
      for (auto* block : blocks) CachingAllocator::deallocate(block);
    };
    std::jthread([&] { give_back(take(dead, 40)); }).join();  // its heap is nobody's now
    EXPECT_GE(allocator.stats().cached_bytes, kAll / 4);
    give_back(take(dead / 2 * 3, 70));
    EXPECT_LE(allocator.stats().reserved_bytes, kAll);
    allocator.release();
    EXPECT_EQ(allocator.stats().cached_bytes, 0U);
    EXPECT_EQ(allocator.stats().reserved_bytes, 0U);
    give_back(take(dead, 40));
  }
}

TEST(CachingAllocator, WhatIsReleasedIsTheSystemsAgain) {
  auto& allocator = make_allocator();
  std::vector<void*> blocks;
  for (const std::size_t bytes : {1000, 1 << 20, 1 << 26}) {
    blocks.push_back(allocator.allocate(bytes));
    std::memset(blocks.back(), 7, bytes);
  }
  std::jthread([&] { CachingAllocator::deallocate(blocks[1]); }).join();
  for (const int i : {0, 2}) CachingAllocator::deallocate(blocks[static_cast<std::size_t>(i)]);
  allocator.release();
  EXPECT_EQ(allocator.stats().reserved_bytes, 0U);
  const auto* again = static_cast<char*>(allocator.allocate(1 << 20));
  EXPECT_EQ(again, blocks[1]);
  EXPECT_EQ(again[1 << 19], 0) << "its pages were not given back";
}

// One thread releases while others allocate and free.
TEST(CachingAllocator, ReleasesWhileOthersWork) {
  auto& allocator = make_allocator();
  std::atomic<bool> done{false};
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::uint64_t round = 0; !done; ++round) {
        const std::size_t bytes = std::size_t{64} << (round % 16);
        auto* const data = static_cast<unsigned char*>(allocator.allocate(bytes));
        std::memset(data, thread + 1, bytes);
        EXPECT_EQ(data[bytes - 1], thread + 1);
        CachingAllocator::deallocate(data);
      }
    });
  }
  for (int i = 0; i < 200; ++i) allocator.release();
  done = true;
  threads.clear();
  allocator.release();
  EXPECT_EQ(allocator.stats().reserved_bytes, 0U);
}

TEST(CachingAllocator, ProcessesOfAHostShareItsMemory) {
  auto& allocator = make_allocator(10'000);
  share_memory_among(4);
  void* const block = allocator.allocate(8192);
  CachingAllocator::deallocate(block);
  share_memory_among(1);
  EXPECT_EQ(allocator.stats().cached_bytes, 0U);
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

#if !defined(__SANITIZE_ADDRESS__)  // under which tensors have memory that the sanitizer watches
TEST(CachingAllocator, ServesLibTorchsTensors) {
  const auto tensor = torch::empty({1 << 20});
  EXPECT_GE(memory_stats().reserved_bytes - memory_stats().cached_bytes, tensor.nbytes());
  EXPECT_EQ(tensor.storage().data_ptr().get_deleter(), &CachingAllocator::deallocate);
}

TEST(CachingAllocator, ReleaseMemoryIsForTheUser) {
  torch::empty({1 << 22});
  EXPECT_GT(memory_stats().cached_bytes, 0U);
  release_memory();
  EXPECT_EQ(memory_stats().cached_bytes, 0U);
}
#endif

}  // namespace
}  // namespace lockstep::ops
