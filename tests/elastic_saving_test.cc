// Tests the checkpoints of several workers, through `lockstep run`: when workers are lost meanwhile, when the training
// is stopped, and when files are damaged.
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <string>

#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "tests/elastic_job.h"
#include "tests/small_disk.h"

namespace lockstep {
namespace {

constexpr int kEpochs = 3, kSteps = 20 * kEpochs;

Process run(const std::vector<std::string>& variables, int workers, int fewest = 1) {
  return elastic_job(ELASTIC_PROGRAM, variables, workers, fewest);
}

class ElasticSaving : public testing::Test {
 protected:
  static std::vector<std::vector<double>> weights(const std::string& output) {
    return numbers_after(output, text("steps ", kSteps, ", weights"));
  }
  static const std::vector<double>& alone() {
    static const auto expected = [] {
      auto job = run({}, 0);
      return weights(job.wait_for_end(60)).at(0);
    }();
    return expected;
  }
  static void expect_trained(Process& job, std::size_t workers) {
    const auto& output = job.wait_for_end(60);
    EXPECT_TRUE(WIFEXITED(job.status()) && WEXITSTATUS(job.status()) == 0) << output;
    const auto got = weights(output);
    EXPECT_EQ(got.size(), workers) << output;
    for (const auto& one : got) EXPECT_LE(difference(one, alone()), 1e-9) << output;
    for (const auto& one : got) EXPECT_EQ(one, got[0]) << output;
  }

  // A training of four workers that all were told to end after a step in the second epoch, and have saved.
  static std::filesystem::path stopped(const std::string& name, bool sharded_in_background = false) {
    const auto folder = fresh_folder("elastic_saving", name);
    const auto one_if = text(sharded_in_background ? 1 : 0);
    auto job = run({"STEP_MS=20", "VICTIM=1", "STEP=27", "PLACE=print", text("FOLDER=", folder.string()),
                    "BACKGROUND=" + one_if, "SHARD=" + one_if},
                   4);
    job.wait_for("step 27", 30);
    job.send(SIGTERM);
    EXPECT_EQ(numbers_after(job.wait_for_end(60), "] left").size(), 4U) << job.text();
    return folder;
  }
};

// One worker is lost, and another within milliseconds, while the others regroup or the chief saves.
TEST_F(ElasticSaving, AnotherWorkerIsLostWhileTheOthersRegroupOrSave) {
  const char* const asked = std::getenv("LOCKSTEP_FAULT_ROUNDS");
  const int rounds = asked == nullptr ? 4 : std::atoi(asked);
  for (int seed = 0; seed < rounds; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const auto below = [&](int end) { return static_cast<int>(random() % static_cast<unsigned>(end)); };
    const bool sharded = seed % 4 == 3;  // two losses may then need a backup, which is there from step 2 on
    const int step = sharded ? 4 + below(kSteps - 4) : below(kSteps), first = below(3000),
              second = first + below(15000);
    const int victim = below(4), other = (victim + 1 + below(3)) % 4;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": workers " << victim << " and " << other << ", " << first
                                    << " and " << second << " us after the forward pass of step " << step);
    const auto folder = fresh_folder("elastic_saving", text("seed_", seed));
    auto job = run({text("VICTIM=", victim), text("STEP=", step), text("PLACE=", first), text("SECOND=", other),
                    text("SECOND_US=", second), text("FOLDER=", folder.string()), text("BACKGROUND=", seed % 2),
                    text("SHARD=", sharded ? 1 : 0)},
                   4);
    expect_trained(job, 4 - numbers_after(job.wait_for_end(60), "ended by signal").size());
    std::ifstream log(folder / "log.csv");
    std::string epochs;
    for (std::string line; std::getline(log, line);) epochs += line.substr(0, line.find(',')) + " ";
    EXPECT_EQ(epochs, "epoch 0 1 2 ") << job.text();
    for (int epoch = 1; epoch <= kEpochs; ++epoch)
      EXPECT_TRUE(std::filesystem::exists(folder / text("ckpt-", epoch, ".safetensors"))) << job.text();
  }
}

// The newcomer also writes its part of the checkpoints that come then.
TEST_F(ElasticSaving, ANewcomerJoinsWhileTheOthersWriteInTheBackground) {
  const auto folder = fresh_folder("elastic_saving", "newcomer");
  auto job = elastic_job(ELASTIC_PROGRAM,
                         {"VICTIM=1", "STEP=5", "PLACE=forward", "STEP_MS=50", "BACKGROUND=1", "SHARD=1",
                          text("FOLDER=", folder.string())},
                         3, 2, 1);
  expect_trained(job, 3);
  EXPECT_NE(job.text().find("fit goes on with 3 workers (2 before)"), std::string::npos) << job.text();
  for (int epoch = 1; epoch <= kEpochs; ++epoch)
    EXPECT_TRUE(std::filesystem::exists(folder / text("ckpt-", epoch, ".safetensors"))) << job.text();
}

// The chief writes, or all in the background. There is room again before the last checkpoints.
TEST_F(ElasticSaving, AFullDiskDoesNotEndTheTraining) {
  for (const int background : {0, 1}) {
    SCOPED_TRACE(background);
    const auto folder = fresh_folder("elastic_saving", text("full_disk_", background));
    const SmallDisk disk(folder);
    disk.fill();
    auto job = run(
        {text("BACKGROUND=", background), text("SHARD=", background), "STEP_MS=20", text("FOLDER=", folder.string())},
        3);
    job.wait_for("training goes on without this checkpoint", 30);
    disk.make_room();
    expect_trained(job, 3);
    EXPECT_TRUE(std::filesystem::exists(folder / text("ckpt-", kEpochs, ".safetensors"))) << job.text();
  }
}

TEST_F(ElasticSaving, FourWorkersStopAndThreeOrFiveGoOn) {
  for (const int workers : {3, 5}) {
    SCOPED_TRACE(workers);
    const auto folder = stopped(text("on_", workers), /*sharded_in_background=*/workers == 3);
    auto job = run({text("FOLDER=", folder.string()), text("SHARD=", workers == 5 ? 1 : 0)}, workers);
    expect_trained(job, static_cast<std::size_t>(workers));
    EXPECT_EQ(numbers_after(job.text(), "history").size(), static_cast<std::size_t>(workers));
  }
}

TEST_F(ElasticSaving, TheBackupBeforeADamagedOneIsTaken) {
  const auto folder = stopped("damaged");
  const auto backup = folder / "backup" / "backup.safetensors";
  {
    std::fstream file(backup, std::ios::in | std::ios::out | std::ios::binary);
    const auto middle = static_cast<std::streamoff>(std::filesystem::file_size(backup) - 100);
    file.seekg(middle);
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(middle);
    file.put(byte);
  }
  auto job = run({text("FOLDER=", folder.string())}, 3);
  expect_trained(job, 3);
  EXPECT_NE(job.text().find("fit takes the backup before it"), std::string::npos) << job.text();
}

TEST_F(ElasticSaving, ACopyThatDiffersIsNamedAndReplacedWhereTheProgramSaysSo) {
  for (const bool replaces : {false, true}) {
    SCOPED_TRACE(replaces);
    auto job = run({"VICTIM=1", "STEP=13", "PLACE=corrupt", "COMPARE=10", text("REPLACE=", replaces ? 1 : 0)}, 3);
    const auto& output = job.wait_for_end(60);
    EXPECT_NE(output.find("worker 1"), std::string::npos) << output;
    EXPECT_EQ(WIFEXITED(job.status()) && WEXITSTATUS(job.status()) == 0, replaces) << output;
    const auto got = weights(output);
    EXPECT_EQ(got.size(), replaces ? 3U : 0U) << output;
    for (const auto& one : got) EXPECT_EQ(one, got[0]) << output;
  }
}

}  // namespace
}  // namespace lockstep
