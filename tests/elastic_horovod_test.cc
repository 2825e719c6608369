// Loops with Horovod Elastic's front end, through `lockstep run`, that go on from their last commit.
#include <gtest/gtest.h>
#include <signal.h>

#include <string>

#include "tests/elastic_job.h"

namespace lockstep {
namespace {

// Returns the numbers of simulated GPUs with which ranks train; without any, they train on CPUs.
std::vector<std::string> numbers_of_gpus() {
  if (SIMULATED_GPUS) return {"0", "4"};
  return {"0"};
}

// Nothing but GPUs was used where there were some.
void expect_on_gpus(const std::string& output, const std::string& gpus) {
  EXPECT_EQ(output.find("trains on cuda:") != std::string::npos, gpus != "0") << output;
  EXPECT_EQ(output.find("through host memory"), std::string::npos) << output;
}

Process run(const std::vector<std::string>& variables, int ranks, int restarts = 0) {
  return elastic_job(ELASTIC_PROGRAM, variables, ranks, 1, restarts);
}

// Returns the weights of each rank that ended well, after `batches` batches.
std::vector<std::vector<double>> weights(Process& job, int batches) {
  const auto& output = job.wait_for_end(60);
  EXPECT_TRUE(WIFEXITED(job.status()) && WEXITSTATUS(job.status()) == 0) << output;
  return numbers_after(output, text("batches ", batches, ", weights"));
}

TEST(HorovodElastic, TheOthersGoOnFromTheLastCommit) {
  // In each epoch 20 batches of three ranks, or 30 of two; in the second epoch, 10 of three and 15 of two.
  const int batches = 20 + 10 + 15 + 30;
  auto alone = run({"ALONE=1", "BATCH=30"}, 0);
  const auto expected = weights(alone, batches);
  ASSERT_EQ(expected.size(), 1U) << alone.text();
  for (const auto& gpus : numbers_of_gpus()) {
    for (const int victim : {0, 1, 2, 3}) {  // the last one is rank 1, in the middle of backward
      SCOPED_TRACE(testing::Message() << "rank " << victim << " of those on " << gpus << " GPUs");
      const std::string place = victim == 3 ? "backward" : "";
      auto job = run(
          {text("VICTIM=", victim == 3 ? 1 : victim), "PLACE=" + place, "BATCH=30", "LOCKSTEP_SIMULATED_GPUS=" + gpus},
          3);
      const auto got = weights(job, batches);
      EXPECT_EQ(got.size(), 2U) << job.text();
      for (const auto& one : got) EXPECT_LE(difference(one, expected[0]), 1e-9) << job.text();
      EXPECT_NE(job.text().find("reset 1: 2"), std::string::npos) << job.text();
      EXPECT_NE(job.text().find("training goes on from its last commit: "), std::string::npos) << job.text();
      expect_on_gpus(job.text(), gpus);
    }
  }
}

TEST(HorovodElastic, ANewcomerIsTakenIn) {
  for (const auto& gpus : numbers_of_gpus()) {
    auto job = run({"VICTIM=0", "BATCH=5", "STEP_MS=50", "LOCKSTEP_SIMULATED_GPUS=" + gpus}, 3, 1);
    const auto& output = job.wait_for_end(60);
    EXPECT_NE(output.find("reset 2: 3"), std::string::npos) << output;
    EXPECT_NE(output.find("joined at batch"), std::string::npos) << output;
    expect_on_gpus(output, gpus);
    const auto got = numbers_after(output, ", weights");
    EXPECT_EQ(got.size(), 3U) << output;
    for (const auto& one : got) EXPECT_EQ(one, got[0]) << output;
  }
}

TEST(HorovodElastic, ARankThatIsToldToEndLeavesAndNothingIsUndone) {
  auto job = run({"VICTIM=2", "BATCH=10", "PLACE=print", "STEP_MS=20"}, 3);
  const int process = process_of(job, 1, "rank");
  job.wait_for_line("[2] batch 10", 30);
  kill(process, SIGTERM);
  const auto& output = job.wait_for_end(60);
  EXPECT_NE(output.find("[1] left\n"), std::string::npos) << output;
  EXPECT_EQ(output.find("last commit"), std::string::npos) << output;
  const auto got = numbers_after(output, ", weights");
  EXPECT_EQ(got.size(), 2U) << output;
  for (const auto& one : got) EXPECT_EQ(one, got[0]) << output;
}

}  // namespace
}  // namespace lockstep
