// Memory that all ranks read and write by themselves.
#include <gtest/gtest.h>

#include "base/expect_says_testing.h"
#include "collective/ranks_testing.h"

namespace lockstep::collective {
namespace {

using AllocateShared = testing::TestWithParam<std::string>;

TEST_P(AllocateShared, EveryRankWritesIntoAllPartsOrNoneHasAny) {
  for (const int size : {1, 2, 5}) {
    expect_no_errors(run_ranks({.size = size, .group = {.backend = GetParam()}}, [&](const Group& group) {
      const bool shares = GetParam() == "threads" || GetParam() == "shm";
      for (const std::size_t bytes : {std::size_t{64}, std::size_t{5'000'000}}) {
        const auto parts = group.allocate_shared(bytes, soon());
        ASSERT_EQ(parts.size(), shares ? static_cast<std::size_t>(size) : 0);
        for (const auto& part : parts) {
          ASSERT_EQ(part[static_cast<std::size_t>(group.rank())], std::byte{0});
          part[static_cast<std::size_t>(group.rank())] = std::byte(1 + group.rank());
        }
        group.barrier(soon());
        for (const auto& part : parts) {
          for (int r = 0; r < size; ++r) ASSERT_EQ(part[static_cast<std::size_t>(r)], std::byte(1 + r));
        }
        group.barrier(soon());
      }
    }));
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, AllocateShared, testing::Values("threads", "shm", "tcp", "hierarchical"),
                         [](const auto& test) { return test.param; });

TEST(AllocateSharedWithOtherArguments, IsAnErrorOnEveryRank) {
  const auto fails = [](const RankOptions& options, std::size_t first, std::size_t second, const std::string& message) {
    const auto errors = run_ranks(
        options, [&](const Group& group) { group.allocate_shared(group.rank() == 0 ? first : second, soon()); });
    for (const auto& error : errors) {
      expect_says(message_of<InvalidArgument>([&] { std::rethrow_exception(error); }), message);
    }
  };
  for (const std::string backend : {"threads", "shm"}) {
    fails({.group = {.backend = backend}}, 64, 128,
          "the ranks' calls differ: rank 0 calls allocate_shared with 64 bytes, rank 1 with 128");
  }
  fails({}, 0, 0, "allocate_shared: 0 bytes; it must be at least 1");
}

}  // namespace
}  // namespace lockstep::collective
