#include "train/stragglers.h"

#include <gtest/gtest.h>

namespace lockstep::train {
namespace {

// Returns the step, counted from 1, after which a worker was named, and the sentence; 0 where none was in `steps`.
std::pair<int, std::string> first_named(Stragglers& stragglers, int steps, const std::vector<double>& seconds) {
  for (int step = 1; step <= steps; ++step) {
    auto said = stragglers.count(seconds);
    if (!said.empty()) return {step, said};
  }
  return {0, ""};
}

TEST(Stragglers, AreNamedWithinTwentyStepsAndOnce) {
  Stragglers stragglers;
  const auto [step, said] = first_named(stragglers, 20, {0.02, 0.06, 0.02});
  EXPECT_EQ(step, 20);
  EXPECT_EQ(said,
            "worker 1 is a straggler: it computes for 60 ms a step and the others for 20 ms, so that they wait for it "
            "67% of the time");
  EXPECT_EQ(first_named(stragglers, 100, {0.02, 0.06, 0.02}).first, 0);
  EXPECT_EQ(first_named(stragglers, 100, {0.02, 0.02, 0.02}).first, 0);
  EXPECT_EQ(first_named(stragglers, 20, {0.06, 0.02, 0.02}).first, 20);  // another worker
}

TEST(Stragglers, AFewSlowStepsAreNone) {
  Stragglers stragglers;
  for (int step = 0; step < 100; ++step) {
    EXPECT_EQ(stragglers.count(std::vector<double>{0.02, step % 5 == 0 ? 0.5 : 0.02}), "");
  }
  EXPECT_EQ(first_named(stragglers, 100, {0.02, 0.029}).first, 0);
  EXPECT_EQ(first_named(stragglers, 100, {0.02}).first, 0);
  EXPECT_EQ(first_named(stragglers, 100, {0.0001, 0.0003}).first, 0);
}

TEST(Stragglers, AreLookedForAnewWithOtherWorkers) {
  Stragglers stragglers;
  EXPECT_EQ(first_named(stragglers, 15, {0.02, 0.06}).first, 0);
  EXPECT_EQ(first_named(stragglers, 100, {0.02, 0.06, 0.02}).first, 20);
}

}  // namespace
}  // namespace lockstep::train
