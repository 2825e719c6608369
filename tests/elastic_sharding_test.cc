// Elastic trainings with shard_optimizer_state: what a lost worker alone updated is not lost with it.
#include <gtest/gtest.h>
#include <signal.h>

#include <random>
#include <string>
#include <vector>

#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "tests/elastic_job.h"

namespace lockstep {
namespace {

constexpr int kSteps = 60;  // of three epochs

using Variables = std::vector<std::string>;

Variables operator+(Variables all, const Variables& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

// Weights, and losses and metrics of each epoch, that one process without others trains.
struct Trained {
  std::vector<double> weights, history;
};

Trained train_alone(const Variables& variables) {
  auto job = elastic_job(ELASTIC_PROGRAM, variables, 0, 0);
  const auto output = job.wait_for_end(60);
  const auto weights = numbers_after(output, text("steps ", kSteps, ", weights")),
             history = numbers_after(output, "history");
  if (weights.size() != 1 || history.size() != 1) throw Error(output);
  return {weights[0], history[0]};
}

// `compares_history`: false where a worker may be lost after an update, with its part of the step's loss.
void expect_trained(Process& job, int survivors, const Trained& expected, bool compares_history = true) {
  const auto& output = job.wait_for_end(60);
  EXPECT_TRUE(WIFEXITED(job.status()) && WEXITSTATUS(job.status()) == 0) << output;
  const auto weights = numbers_after(output, text("steps ", kSteps, ", weights")),
             histories = numbers_after(output, "history");
  EXPECT_EQ(static_cast<int>(weights.size()), survivors) << output;
  for (const auto& one : weights) {
    EXPECT_LE(difference(one, expected.weights), 1e-9) << output;
    EXPECT_EQ(one, weights[0]) << output;
  }
  if (!compares_history) return;
  for (const auto& one : histories) EXPECT_LE(difference(one, expected.history), 1e-9) << output;
}

class ElasticSharding : public testing::Test {
 protected:
  static const Trained& expected(bool clips) {
    static const auto plain = train_alone({"CLIP=0"}), clipped = train_alone({"CLIP=1"});
    return clips ? clipped : plain;
  }

  static Process run(const Variables& variables, int workers, int fewest, int restarts = 0) {
    return elastic_job(ELASTIC_PROGRAM, Variables{"SHARD=1"} + variables, workers, fewest, restarts);
  }
};

// A second one may be lost while the others regroup, move the state or go back to a backup, of which there is one.
TEST_F(ElasticSharding, WorkersMayBeLostAtAnyMoment) {
  const char* const asked = std::getenv("LOCKSTEP_FAULT_ROUNDS");
  const int rounds = asked == nullptr ? 6 : std::atoi(asked);
  for (int seed = 0; seed < rounds; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const auto below = [&](unsigned bound) { return static_cast<int>(random() % bound); };
    const bool clips = seed % 2 == 1, second = seed % 4 > 1;
    const int workers = second ? 4 : 3, victim = below(3), step = 4 + below(kSteps - 4), microseconds = below(3000);
    Variables variables{text("VICTIM=", victim), text("STEP=", step), text("PLACE=", microseconds),
                        text("CLIP=", clips ? 1 : 0), text("REPLICAS=", seed % 8 == 1 ? 2 : 1)};
    if (second) {
      const auto folder = fresh_folder("elastic", text("any_moment_", seed));
      variables =
          variables + Variables{text("SECOND=", (victim + 1 + below(2)) % 4),
                                text("SECOND_US=", microseconds + below(8000)), text("FOLDER=", folder.string())};
    }
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << join(variables, " "));
    auto job = run(variables, workers, 2);
    const auto lost = numbers_after(job.wait_for_end(60), "ended by signal").size();
    expect_trained(job, workers - static_cast<int>(lost), expected(clips), /*compares_history=*/false);
  }
}

TEST_F(ElasticSharding, ANewcomerGetsItsShardsFromTheOthers) {
  for (const int victim : {0, 2}) {
    SCOPED_TRACE(testing::Message() << "worker " << victim);
    auto job = run({text("VICTIM=", victim), "STEP=5", "PLACE=forward", "STEP_MS=50"}, 3, 2, 1);
    expect_trained(job, 3, expected(false));
    EXPECT_NE(job.text().find("fit goes on with 3 workers (2 before)"), std::string::npos) << job.text();
  }
}

TEST_F(ElasticSharding, TwoLostAtOnceThatAreNoNeighboursLoseNothing) {
  auto job = run({"VICTIM=0", "KILL_ALSO=2", "STEP=45", "PLACE=forward"}, 4, 2);
  expect_trained(job, 2, expected(false));
}

TEST_F(ElasticSharding, WhereBothCopiesAreLostTheTrainingGoesBackToTheLastBackup) {
  const auto folder = fresh_folder("elastic", "both_copies");
  auto job = run({"VICTIM=0", "KILL_ALSO=1", "STEP=45", "PLACE=forward", text("FOLDER=", folder.string())}, 4, 2);
  expect_trained(job, 2, expected(false));
  EXPECT_NE(job.text().find("workers were lost together that alone had a part of the optimizer's state"),
            std::string::npos)
      << job.text();
  EXPECT_NE(job.text().find("it goes on from the last checkpoint, in epoch 2 after 4 steps"), std::string::npos)
      << job.text();
}

TEST_F(ElasticSharding, WithoutABackupItEndsAndSaysSo) {
  auto job = run({"VICTIM=0", "KILL_ALSO=1", "STEP=45", "PLACE=forward"}, 4, 2);
  const auto& output = job.wait_for_end(60);
  EXPECT_FALSE(WIFEXITED(job.status()) && WEXITSTATUS(job.status()) == 0) << output;
  EXPECT_NE(output.find("BackupAndRestore makes checkpoints to which fit can go back"), std::string::npos) << output;
}

// Two neighbours leave, one after the other. Each has the only copy of the other's shards.
TEST_F(ElasticSharding, WorkersThatAreToldToEndLeaveBehindTheirSteps) {
  auto job = run({"STEP_MS=20", "VICTIM=3", "STEP=10", "PLACE=print"}, 4, 2);
  const int one = process_of(job, 0), other = process_of(job, 1);
  job.wait_for_line("[3] step 10", 30);
  kill(one, SIGTERM);
  kill(other, SIGTERM);
  expect_trained(job, 2, expected(false));
  for (const int rank : {0, 1})
    EXPECT_NE(job.text().find(text("[", rank, "] left\n")), std::string::npos) << job.text();
}

// A newcomer gets the mean of running statistics over another worker's replicas.
TEST_F(ElasticSharding, ANewcomerGetsBuffersToo) {
  for (const auto* const shards : {"SHARD=0", "SHARD=1"}) {
    SCOPED_TRACE(shards);
    auto job = run({shards, "NORM=1", "VICTIM=1", "STEP=5", "PLACE=forward", "STEP_MS=50"}, 3, 2, 1);
    const auto weights = numbers_after(job.wait_for_end(60), text("steps ", kSteps, ", weights"));
    EXPECT_EQ(weights.size(), 3U) << job.text();
    for (const auto& one : weights) EXPECT_EQ(one, weights[0]) << job.text();
  }
}

}  // namespace
}  // namespace lockstep
