#include <gtest/gtest.h>
#include <signal.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <set>
#include <thread>

#include "base/hash.h"
#include "base/mutex.h"
#include "base/process.h"
#include "base/text.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/random.h"

namespace lockstep {
namespace {

// The thread waits already, is about to, or has not begun: all three end.
TEST(Stop, EndsAWaitAtOnce) {
  for (int i = 0; i < 1000; ++i) {
    bool was_asked = false;
    {
      const std::jthread waits(
          [&](const std::stop_token& stop) { was_asked = stop_requested_by(Deadline::never(), stop); });
    }
    ASSERT_TRUE(was_asked) << i;
  }
}

TEST(Stop, IsNotAskedForWhereADeadlinePasses) {
  EXPECT_FALSE(stop_requested_by(Deadline::after(std::chrono::milliseconds(1)), std::stop_source().get_token()));
  EXPECT_FALSE(stop_requested_by(Deadline::after(std::chrono::milliseconds(1)), {}));
}

TEST(Cpus, UsableOnesAreAmongTheAllowed) {
  EXPECT_GE(usable_cpu_count(), 1);
  EXPECT_LE(usable_cpu_count(), static_cast<int>(allowed_cpus().size()));
}

TEST(Cpus, APinnedThreadIsAllowedThereOnly) {
  std::jthread([] {
    const std::vector<int> last{allowed_cpus().back()};
    ASSERT_TRUE(pin_current_thread(last));
    EXPECT_EQ(allowed_cpus(), last);
    EXPECT_EQ(usable_cpu_count(), 1);
  }).join();
}

TEST(Random, TheSequenceBeginsAnewWithTheSeed) {
  set_random_seed(5);
  const auto first = next_random_seed();
  const auto second = next_random_seed();
  EXPECT_NE(first, second);
  set_random_seed(5);
  EXPECT_EQ(next_random_seed(), first);
  EXPECT_EQ(next_random_seed(), second);
  set_random_seed(6);
  EXPECT_NE(next_random_seed(), first);
}

TEST(Hash, DependsOnEveryArgumentAndTheirOrder) {
  std::set<std::uint64_t> seen;
  for (std::uint64_t a = 0; a < 30; ++a) {
    for (std::uint64_t b = 0; b < 30; ++b) seen.insert(mix(a, b));
  }
  EXPECT_EQ(seen.size(), 900U);
}

TEST(Text, PrintsAndJoins) {
  EXPECT_EQ(text("a", 1, ' ', 2.5), "a1 2.5");
  EXPECT_EQ(join(std::vector<int>{1, 2, 3}), "1, 2, 3");
  EXPECT_EQ(join(std::vector<int>{}), "");
}

TEST(Errors, SayWhatHappened) {
  const DeadlineExceeded error("barrier", std::chrono::seconds(2));
  EXPECT_EQ(error.operation(), "barrier");
  EXPECT_EQ(error.waited_for(), std::chrono::seconds(2));
  EXPECT_EQ(Interrupted(15).signal(), 15);
  EXPECT_FALSE(Deadline::after(std::chrono::hours(1)).passed());
  EXPECT_TRUE(Deadline::after(std::chrono::seconds(-1)).passed());
}

// Two nodes, whose cores the kernel numbers in turns, with two hardware threads a core.
template <class E>
void fail_with(const E& error) {
  throw error;
}

// A program that catches nothing, as it seems to the process that started it.
TEST(UncaughtErrors, EndTheProgramWithTheirTextAndAStatus) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto fails = [](const auto& error) noexcept { fail_with(error); };
  EXPECT_EXIT(fails(InvalidArgument("batch is 0; it must be above 0")), testing::ExitedWithCode(1),
              "^lockstep: batch is 0; it must be above 0\n$");
  EXPECT_EXIT(fails(Interrupted(SIGINT)), testing::ExitedWithCode(130), "^lockstep: training was interrupted by Int");
  EXPECT_EXIT(fails(Interrupted(SIGTERM)), testing::ExitedWithCode(143), "Terminated");
  EXPECT_EXIT(fails(std::runtime_error("of others")), testing::KilledBySignal(SIGABRT), "what\\(\\):  of others");
  EXPECT_EXIT(std::terminate(), testing::KilledBySignal(SIGABRT), "");
}

TEST(UncaughtErrors, WhatWasPrintedBeforeIsNotLost) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto file = testing::TempDir() + "/uncaught_output";
  EXPECT_EXIT(
      [&]() noexcept {
        if (std::freopen(file.c_str(), "w", stdout) == nullptr) std::_Exit(3);
        std::cout << "epoch 1\n";
        fail_with(Error("the disk is full"));
      }(),
      testing::ExitedWithCode(1), "the disk is full");
  std::string line;
  std::getline(std::ifstream(file) >> std::ws, line);
  EXPECT_EQ(line, "epoch 1");
}

TEST(Resources, CpusAreOrderedByWhatTheyShare) {
  const auto system = std::filesystem::path(testing::TempDir()) / "lockstep_cpus";
  for (int cpu = 0; cpu < 8; ++cpu) {
    const auto folder = system / "cpu" / ("cpu" + std::to_string(cpu));
    std::filesystem::create_directories(folder / "topology");
    std::filesystem::create_directories(folder / ("node" + std::to_string(cpu % 2)));
    std::ofstream(folder / "topology/physical_package_id") << cpu % 2 << "\n";
    std::ofstream(folder / "topology/core_id") << cpu % 4 / 2 << "\n";
  }
  EXPECT_EQ(cpus_by_place({0, 1, 2, 3, 4, 5, 6, 7}, system), (std::vector<int>{0, 4, 2, 6, 1, 5, 3, 7}));
  EXPECT_EQ(cpus_by_place({3, 1, 0}, system / "nowhere"), (std::vector<int>{3, 1, 0}));
  std::filesystem::remove_all(system);
  EXPECT_EQ(cpus_by_place(allowed_cpus()).size(), allowed_cpus().size());
}

}  // namespace
}  // namespace lockstep
