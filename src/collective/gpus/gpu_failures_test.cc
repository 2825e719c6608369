// How calls on GPUs fail: who is late, what NCCL reports, and lost processes.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <barrier>
#include <chrono>
#include <csignal>
#include <cstdio>

#include "base/expect_says_testing.h"
#include "collective/gpus/gpus_testing.h"
#include "collective/ranks_testing.h"

namespace lockstep::collective::gpus {
namespace {

constexpr std::chrono::milliseconds kDeadline(400);

// Returns whom act()'s DeadlineExceeded names.
std::vector<int> blamed_when(const std::function<void()>& act) {
  try {
    act();
  } catch (const DeadlineExceeded& error) {
    return error.ranks();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

class GpuFailures : public GroupsOnGpus {
 protected:
  // Makes a call with `fault` on rank 1, and expects that each rank throws in time what `expect` expects. Another Group
  // of the process then works.
  static void expect_failure(const char* fault, const std::function<void(int rank, const std::string&)>& expect) {
    std::barrier all_ranks(3);
    expect_no_errors(run(3, [&](const Group& group) {
      const OnGpu one(group, {1});
      if (std::string(fault).starts_with("init")) {
        if (group.rank() == 0) simulated_nccl_fault(fault, 1);
      } else {
        group.run(one.all_reduce(), soon());
        group.synchronize(soon());
        if (group.rank() == 0) simulated_nccl_fault(fault, 1);
      }
      all_ranks.arrive_and_wait();
      std::string message;
      const auto took = seconds_of([&] {
        message = message_of<Error>([&] {
          group.run(one.all_reduce(), Deadline::after(kDeadline));
          group.synchronize(soon());
        });
      });
      expect(group.rank(), message);
      EXPECT_LT(took, std::chrono::duration<double>(kDeadline).count() + 2);
      EXPECT_THROW(group.check(soon()), Error);
      EXPECT_THROW(group.run(one.all_reduce(), soon()), Error);
      EXPECT_THROW(group.barrier(soon()), Error);
    }));
    simulated_nccl_fault(nullptr, -1);
    expect_no_errors(run(3, [](const Group& group) {
      const OnGpu one(group, {1});
      group.run(one.all_reduce(), soon());
      EXPECT_EQ(one.values(), std::vector<double>{3});
    }));
  }
};

TEST_P(GpuFailures, ARankThatDoesNotComeIsNamed) {
  expect_no_errors(run(3, [](const Group& group) {
    const OnGpu values(group, {1});
    group.run(values.all_reduce(), soon());
    group.synchronize(soon());
    if (group.rank() == 2) {
      const auto has_failed = [&] {
        try {
          group.check(soon());
          return false;
        } catch (const Error&) {
          return true;
        }
      };
      EXPECT_TRUE(wait_until(has_failed, Deadline::after(std::chrono::seconds(20))));
      EXPECT_THROW(group.run(values.all_reduce(), soon()), Error);
      return;
    }
    std::string message;
    const auto took = seconds_of([&] {
      group.run(values.all_reduce(), Deadline::after(kDeadline));
      message = message_of<DeadlineExceeded>([&] { group.synchronize(soon()); });
    });
    expect_says(message, "all_reduce");
    expect_says(message, "rank 2");
    EXPECT_LT(took, std::chrono::duration<double>(kDeadline).count() + 2);
  }));
}

TEST_P(GpuFailures, ARankThatDoesNotComeIsNamedAlsoByRanksWithLaterDeadlines) {
  constexpr int kLate = 3, kFirstToGiveUp = 1;
  expect_no_errors(run(4, [](const Group& group) {
    const OnGpu values(group, {1});
    group.run(values.all_reduce(), soon());
    group.synchronize(soon());
    const auto blamed = blamed_when([&] {
      if (group.rank() == kLate) {
        while (true) group.check(soon());
      }
      const bool is_first = group.rank() == kFirstToGiveUp;
      group.run(values.all_reduce(), is_first ? Deadline::after(kDeadline) : soon());
      group.synchronize(soon());
    });
    EXPECT_EQ(blamed, std::vector<int>{kLate});
  }));
}

// Rank 2 waits for rank 1, which waits for rank 0, which makes no call. Nobody waits for rank 3.
TEST_P(GpuFailures, AMessageThatDoesNotComeIsBlamedOnTheRankThatWaitsForNobody) {
  for (const bool in_chain : {false, true}) {
    expect_no_errors(run(4, [&](const Group& group) {
      const OnGpu value(group, {1});
      group.run(value.all_reduce(), soon());
      group.synchronize(soon());
      if (group.rank() == 0 || group.rank() == 3 || (group.rank() == 2 && !in_chain)) {
        EXPECT_THROW(while (true) group.check(soon()), DeadlineExceeded);
        return;
      }
      const bool is_first = group.rank() == (in_chain ? 2 : 1);
      const auto blamed = blamed_when([&] {
        group.run(value.recv(group.rank() - 1), is_first ? Deadline::after(kDeadline) : soon());
        group.synchronize(soon());
      });
      if (in_chain) {
        EXPECT_EQ(blamed, (std::vector<int>{0, 3}));
      } else {
        EXPECT_EQ(blamed, std::vector<int>{0});
      }
    }));
  }
}

TEST_P(GpuFailures, ACallThatIsStuckEndsAtItsDeadline) {
  expect_failure("stuck",
                 [](int, const std::string& message) { expect_says(message, "all_reduce: gave up after 0."); });
}

TEST_P(GpuFailures, AnAbortThatHangsHoldsNobodyUp) {
  simulated_nccl_fault("abort-hangs", 0);
  expect_failure("stuck",
                 [](int, const std::string& message) { expect_says(message, "all_reduce: gave up after 0."); });
}

TEST_P(GpuFailures, AnInitThatNeverEndsEndsAtItsDeadline) {
  expect_failure("init-never-ends", [](int, const std::string& message) {
    expect_says(message, "ncclCommInitRankConfig: gave up after 0.");
  });
}

TEST_P(GpuFailures, AnErrorOfNcclIsHeardByAllRanks) {
  for (const char* const fault : {"init-error", "call-error", "async-error"}) {
    expect_failure(fault, [&](int, const std::string& message) {
      expect_says(message, std::string("the test's fault ") + fault);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Over, GpuFailures, testing::Values("threads", "tcp"));

// Ranks are processes, forked by one that has no threads yet.
class LostRank : public testing::TestWithParam<const char*> {
 protected:
  static constexpr int kLost = 2;

  // Rank `kLost` is killed after the first call. Prints what the others' second call says.
  static void run(int rank, const std::string& store) {
    const World world{.rank = rank, .size = 3, .host = "host"};
    const GroupOptions options{.backend = GetParam(), .gpu_backend = "nccl", .checked_calls = 0};
    const auto group = make_group(world, Store::connect(store, soon()), options);
    const OnGpu one(group, {1});
    group.run(one.all_reduce(), soon());
    group.synchronize(soon());
    if (rank == kLost) ::raise(SIGKILL);
    std::string said;
    const auto took = seconds_of([&] {
      said = message_of<PeerLost>([&] {
        group.run(one.all_reduce(), soon());
        group.synchronize(soon());
      });
    });
    std::fprintf(stderr, "%s (%s)\n", said.c_str(), took < 2 ? "soon" : "late");
  }

  static void run_all() {
    std::array<int, 2> address{};
    ASSERT_EQ(::pipe(address.data()), 0);
    std::vector<pid_t> others;
    constexpr std::size_t kAddress = 64;
    for (int rank = 1; rank < 3; ++rank) {
      others.push_back(::fork());
      if (others.back() != 0) continue;
      std::array<char, kAddress> read{};
      if (::read(address[0], read.data(), kAddress) == kAddress) run(rank, read.data());
      ::_exit(0);
    }
    const auto store = Store::hold("127.0.0.1:0");
    std::array<char, kAddress> written{};
    std::copy_n(store.address().begin(), store.address().size(), written.begin());
    for (int i = 1; i < 3; ++i) ASSERT_EQ(::write(address[1], written.data(), kAddress), kAddress);
    run(0, store.address());
    for (const auto other : others) ::waitpid(other, nullptr, 0);
    std::exit(0);
  }
};

TEST_P(LostRank, IsNamedByTheOthersAtOnce) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(run_all(), testing::ExitedWithCode(0),
              "lost rank 2 .*during a call on a GPU .soon.\n.*lost rank 2 .*during a call on a GPU .soon.");
}

INSTANTIATE_TEST_SUITE_P(Over, LostRank, testing::Values("shm", "tcp"));

}  // namespace
}  // namespace lockstep::collective::gpus
