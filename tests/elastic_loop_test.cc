// Loops of three workers (ElasticLoop), through `lockstep run`, that go on when some of them are lost, leave and come.
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <random>
#include <string>

#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "tests/elastic_job.h"

namespace lockstep {
namespace {

constexpr int kSteps = 60;

Process run(const std::vector<std::string>& variables, int workers, int restarts = 0) {
  return elastic_job(ELASTIC_PROGRAM, variables, workers, 1, restarts);
}

class ElasticLoops : public testing::Test {
 protected:
  // Loss, evaluations and weights, as each worker has them at the end.
  static std::vector<std::vector<double>> results(const std::string& output) {
    return numbers_after(output, "trained on 720 examples, loss and evaluations and weights");
  }

  // Expects the results of a loop of one process. Where `loss_too`, the sums include the lost worker's results.
  static void expect_trained(Process& job, int survivors, bool loss_too = true) {
    static const auto alone = [] {
      auto process = run({}, 0);
      return results(process.wait_for_end(60));
    }();
    const auto& output = job.wait_for_end(60);
    EXPECT_TRUE(WIFEXITED(job.status()) && WEXITSTATUS(job.status()) == 0) << output;
    const auto got = numbers_after(output, "loss and evaluations and weights");
    ASSERT_EQ(alone.size(), 1U);
    ASSERT_EQ(static_cast<int>(got.size()), survivors) << output;
    for (auto numbers : got) {
      EXPECT_EQ(numbers, got[0]) << output;
      if (!loss_too) numbers[0] = alone[0][0];
      auto expected = alone[0];
      expected.resize(numbers.size());  // on a mesh without the weights
      EXPECT_LE(difference(numbers, expected), 1e-9) << output;
    }
    EXPECT_TRUE(!loss_too || results(output).size() == got.size()) << output;
  }
};

TEST_F(ElasticLoops, WithoutLossesTheyAreAsOneProcess) {
  auto job = run({}, 3);
  expect_trained(job, 3);
}

TEST_F(ElasticLoops, AWorkerIsLostInAStepOrAnEvaluation) {
  for (const int victim : {0, 2}) {
    for (const char* const place : {"forward", "evaluation"}) {
      SCOPED_TRACE(testing::Message() << "worker " << victim << ", " << place);
      auto job = run({text("VICTIM=", victim), "STEP=25", text("PLACE=", place)}, 3);
      expect_trained(job, 2);
      EXPECT_NE(job.text().find("the loop goes on with 2 workers (3 before)"), std::string::npos) << job.text();
    }
  }
}

// Its NCCL is stuck in the sums of a step when it is lost. The others have enqueued what follows, and must not
// go on from such sums.
TEST_F(ElasticLoops, AWorkerIsLostWhileGpusSum) {
  if (!SIMULATED_GPUS) return;  // real ones have no such fault
  auto job = run({"GPUS=1", "LOCKSTEP_SIMULATED_GPUS=3", "VICTIM=2", "STEP=5", "PLACE=300000"}, 3);
  expect_trained(job, 2);
  EXPECT_NE(job.text().find("lost rank 2 of generation 0: its process ended during a call on a GPU"), std::string::npos)
      << job.text();
}

TEST_F(ElasticLoops, OnAMeshTheOtherRowsGoOnAndANewOneIsTakenIn) {
  for (const char* const shards : {"SHARD=0", "SHARD=1"}) {
    SCOPED_TRACE(shards);
    auto job = run({"MESH=2", shards, "VICTIM=3", "STEP=5", "PLACE=forward", "STEP_MS=50"}, 4, 2);
    expect_trained(job, 4);
    EXPECT_NE(job.text().find("the loop goes on with 2 workers (4 before)"), std::string::npos) << job.text();
    EXPECT_NE(job.text().find("the loop goes on with 4 workers (2 before)"), std::string::npos) << job.text();
  }
}

TEST_F(ElasticLoops, AWorkerMayBeLostAtAnyMoment) {
  const char* const asked = std::getenv("LOCKSTEP_FAULT_ROUNDS");
  const int rounds = asked == nullptr ? 6 : std::atoi(asked);
  for (int seed = 0; seed < rounds; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const int victim = static_cast<int>(random() % 3), step = static_cast<int>(random() % (kSteps - 20)),
              microseconds = static_cast<int>(random() % 2000);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": worker " << victim << ", " << microseconds
                                    << " us after the forward pass of step " << step);
    auto job =
        run({text("VICTIM=", victim), text("STEP=", step), text("PLACE=", microseconds), text("SHARD=", seed % 2)}, 3);
    const bool was_lost = job.wait_for_end(60).find("ended by signal") != std::string::npos;
    expect_trained(job, was_lost ? 2 : 3, false);
  }
}

TEST_F(ElasticLoops, ANewcomerGetsTheStateAndTheLoopsNumbers) {
  for (const int victim : {0, 1}) {
    SCOPED_TRACE(testing::Message() << "worker " << victim);
    auto job = run({text("VICTIM=", victim), "STEP=5", "PLACE=forward", "STEP_MS=50"}, 3, 1);
    expect_trained(job, 3);
    const auto joined = numbers_after(job.text(), "joined at step ");
    ASSERT_EQ(joined.size(), 1U) << job.text();
    EXPECT_GT(joined[0][0], 6) << job.text();
  }
}

// Each prints the same sums and weights: also the newcomer, which comes between two meetings.
TEST_F(ElasticLoops, WorkersApartComeTogetherWhenOneIsLostAndANewOneComes) {
  for (const int restarts : {0, 1}) {
    SCOPED_TRACE(testing::Message() << restarts << " restarts");
    auto job = run({"DILOCO=7", "VICTIM=1", "STEP=25", "PLACE=forward", "STEP_MS=50"}, 3, restarts);
    const auto& output = job.wait_for_end(60);
    EXPECT_TRUE(WIFEXITED(job.status()) && WEXITSTATUS(job.status()) == 0) << output;
    const auto got = numbers_after(output, "loss and evaluations and weights");
    ASSERT_EQ(got.size(), 2U + static_cast<unsigned>(restarts)) << output;
    for (const auto& numbers : got) EXPECT_EQ(numbers, got[0]) << output;
    EXPECT_NE(output.find("the loop goes on with 2 workers (3 before)"), std::string::npos) << output;
    EXPECT_EQ(output.find("the loop goes on with 3 workers (2 before)") != std::string::npos, restarts == 1) << output;
  }
}

// In the second epoch.
TEST_F(ElasticLoops, WhereBothCopiesOfShardsAreLostItGoesBackToItsCheckpoint) {
  const auto folder = fresh_folder("elastic_loop", "both_copies");
  auto job = run({"SHARD=1", "VICTIM=0", "ALSO=1", "STEP=25", "PLACE=forward", text("FOLDER=", folder.string())}, 4);
  expect_trained(job, 2);
  EXPECT_NE(job.text().find("restores: workers were lost together that alone had a part of the optimizer's state"),
            std::string::npos)
      << job.text();
}

TEST_F(ElasticLoops, AWorkerThatIsToldToEndLeaves) {
  auto job = run({"STEP_MS=20", "VICTIM=2", "STEP=10", "PLACE=print"}, 3);
  const int process = process_of(job, 0);
  job.wait_for_line("[2] step 10", 30);
  kill(process, SIGTERM);
  expect_trained(job, 2);
  EXPECT_NE(job.text().find("[0] left\n"), std::string::npos) << job.text();
}

}  // namespace
}  // namespace lockstep
