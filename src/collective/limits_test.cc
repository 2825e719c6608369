// Groups of processes that have limits (ulimit): each test in a process of its own.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <memory>

#include "base/child_process_testing.h"
#include "base/expect_says_testing.h"
#include "cluster/store_process_testing.h"
#include "collective/ranks_testing.h"

namespace lockstep::collective {
namespace {

// Whatever it is that one rank fails with while the group is made, the others hear it and do not wait for their
// deadline.
TEST(World, ARankThatFailsWhileAGroupIsMadeTellsTheOthers) {
  ChildProcess limited([]() -> std::string {
    const rlimit small{10'000, 10'000};  // bytes of a file
    if (setrlimit(RLIMIT_FSIZE, &small) != 0) return "no limit";
    const auto begin = Deadline::after(std::chrono::seconds(0));
    const auto errors = run_ranks({.size = 3, .group = {.backend = "shm", .timeout_seconds = 25}}, [](const Group&) {});
    for (const auto& error : errors) {
      if (!error) return "a rank went on";
      const auto message = message_of([&] { std::rethrow_exception(error); });
      if (message.find("ulimit -f") == std::string::npos) return message;
    }
    return begin.waited().count() < 10 ? "all heard it" : "they waited";
  });
  EXPECT_EQ(limited.said(), "all heard it");
}

// Limits of the process: no room for what ranks share at all, and none for what `allocate` gives out.
TEST(World, LimitsOfAProcessCostSharingAndNotTheJob) {
  const auto trains = [](const rlimit& limit, int which, const std::string& backend) {
    ChildProcess limited([&]() -> std::string {
      if (setrlimit(static_cast<__rlimit_resource>(which), &limit) != 0) return "no limit";
      std::string found;
      const auto errors = run_ranks({.size = 2, .group = {.timeout_seconds = 20}}, [&](const Group& group) {
        const std::size_t count = 20'000'000;
        const auto memory = group.allocate(count * sizeof(float));
        const std::span values(reinterpret_cast<float*>(memory.get()), count);
        for (int call = 0; call < 3; ++call) {
          std::fill(values.begin(), values.end(), static_cast<float>(group.rank() + 1));
          group.all_reduce(buffer_of(values), ReduceOp::sum, soon());
          if (values[0] != 3 || values[count - 1] != 3) throw Error("a wrong sum");
        }
        if (group.rank() == 0) found = group.backend();
      });
      for (const auto& error : errors) {
        if (error) return message_of([&] { std::rethrow_exception(error); });
      }
      return found;
    });
    EXPECT_EQ(limited.said(), backend);
  };
  trains({1 << 20, 1 << 20}, RLIMIT_FSIZE, "tcp");
  trains({30 << 20, 30 << 20}, RLIMIT_FSIZE, "shm");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they reserve terabytes of addresses
  trains({700 << 20, 700 << 20}, RLIMIT_AS, "shm");
#endif
}

// Descriptors that are on their way count together for all processes of a user, but root.
TEST(World, AHundredRanksOfAUserStart) {
  constexpr int kRanks = 100;
  ChildProcess job([]() -> std::string {
    const rlimit usual{1024, 1024};
    if (setrlimit(RLIMIT_NOFILE, &usual) != 0 || (::geteuid() == 0 && ::setuid(65534) != 0)) return "no user";
    const Access access{.token = std::string(32, 't')};
    const cluster::StoreProcess store(access);
    std::vector<std::unique_ptr<ChildProcess>> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.push_back(std::make_unique<ChildProcess>([&]() -> std::string {
        const auto mine = Store::connect(store.address(), soon(), access);
        const World world{.rank = rank, .size = kRanks, .host = "one"};
        const auto group = make_group(world, mine, {.backend = "shm", .timeout_seconds = 60});
        group.barrier(Deadline::after(std::chrono::seconds(60)));
        return "started";
      }));
    }
    for (auto& rank : ranks) {
      const auto said = rank->said();
      if (said != "started") return "one said: " + said;
    }
    return "all started";
  });
  EXPECT_EQ(job.said(), "all started");
}

std::size_t addresses_of_this_process() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * 4096;
}

TEST(World, WhatIsReservedFollowsWhatIsUsed) {
  expect_no_errors(run_ranks({.size = 2, .group = {.backend = "shm"}}, [](const Group& group) {
    group.barrier(soon());
    const auto before = addresses_of_this_process();
    const auto other = group.split(0, group.rank(), soon());
    EXPECT_LT(addresses_of_this_process() - before, std::size_t{200} << 20);
    group.barrier(soon());
  }));
}

}  // namespace
}  // namespace lockstep::collective
