// A training that is killed, or interrupted, at any step and started again ends with the bits of one that never was.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/fresh_folder_testing.h"

namespace {

namespace fs = std::filesystem;

struct Ended {
  int status = 0;
  std::string output;
};

Ended run(const std::string& command) {
  FILE* pipe = ::popen(command.c_str(), "r");
  Ended ended;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) ended.output.push_back(static_cast<char>(c));
  ended.status = ::pclose(pipe);
  return ended;
}

Ended run_program(const fs::path& folder, int step, int signal) {
  std::ostringstream command;
  command << RESUME_PROGRAM << " " << folder.string() << " " << step << " " << signal << " 2>&1";
  return run(command.str());
}

std::string contents(const fs::path& file) {
  std::ostringstream out;
  out << std::ifstream(file, std::ios::binary).rdbuf();
  return out.str();
}

class Resume : public testing::TestWithParam<std::pair<int, int>> {
 protected:
  static void SetUpTestSuite() {
    undisturbed = lockstep::fresh_folder("resume", "undisturbed");
    const auto ended = run_program(undisturbed, -1, 0);
    ASSERT_EQ(ended.status, 0) << ended.output;
    ASSERT_EQ(ended.output, "epochs in the history: 4\n");
    ASSERT_GT(contents(undisturbed / "final.safetensors").size(), 1000U);
  }
  static inline fs::path undisturbed;
};

// 7 steps an epoch, a backup each 3 steps and at the end of epochs.
TEST_P(Resume, EndsWithTheSameBits) {
  const auto [step, signal] = GetParam();
  const auto folder =
      lockstep::fresh_folder("resume", "step" + std::to_string(step) + "_signal" + std::to_string(signal));
  const auto first = run_program(folder, step, signal);
  if (signal == SIGKILL) {
    EXPECT_NE(first.status, 0);
    EXPECT_FALSE(first.output.find("epochs in") != std::string::npos) << first.output;
  } else {
    EXPECT_EQ(WEXITSTATUS(first.status), 3) << first.output;
    EXPECT_NE(first.output.find("interrupted by"), std::string::npos) << first.output;
    EXPECT_TRUE(fs::exists(folder / "backup" / "backup.safetensors"));
  }
  EXPECT_FALSE(fs::exists(folder / "final.safetensors"));

  const auto second = run_program(folder, -1, 0);
  EXPECT_EQ(second.status, 0) << second.output;
  EXPECT_TRUE(second.output.ends_with("epochs in the history: 4\n")) << second.output;
  const bool began = step > 3;  // before, there is no checkpoint yet
  EXPECT_EQ(second.output.find("fit goes on from") != std::string::npos, began) << second.output;
  EXPECT_TRUE(contents(folder / "final.safetensors") == contents(undisturbed / "final.safetensors"));
  EXPECT_EQ(contents(folder / "log.csv"), contents(undisturbed / "log.csv"));
  EXPECT_FALSE(fs::exists(folder / "backup" / "backup.safetensors"));
}

INSTANTIATE_TEST_SUITE_P(AtAnyStep, Resume,
                         testing::Values(std::pair(2, SIGKILL), std::pair(4, SIGKILL), std::pair(8, SIGKILL),
                                         std::pair(14, SIGKILL), std::pair(19, SIGKILL), std::pair(5, SIGTERM),
                                         std::pair(16, SIGINT)));

// A program may fail after fit too: the backup is still there, and says that nothing is left to train.
TEST_F(Resume, AProgramThatFailedAfterFitDoesNotTrainAnew) {
  const auto folder = lockstep::fresh_folder("resume", "after_fit");
  const auto failed = run(std::string(RESUME_PROGRAM) + " " + folder.string() + " -1 'fail after fit' 2>&1");
  EXPECT_EQ(WEXITSTATUS(failed.status), 7) << failed.output;
  EXPECT_FALSE(fs::exists(folder / "final.safetensors"));

  const auto second = run_program(folder, -1, 0);
  EXPECT_EQ(second.status, 0) << second.output;
  EXPECT_NE(second.output.find("was trained to the end (4 of 4 epochs)"), std::string::npos) << second.output;
  EXPECT_TRUE(contents(folder / "final.safetensors") == contents(undisturbed / "final.safetensors"));
  EXPECT_EQ(contents(folder / "log.csv"), contents(undisturbed / "log.csv"));
  EXPECT_FALSE(fs::exists(folder / "backup" / "backup.safetensors"));
}

// --- two workers, of which one is killed or interrupted

Ended run_job(const fs::path& folder, int step, int signal, int worker, int restarts) {
  std::ostringstream command;
  command << LOCKSTEP_CLI << " run -n 2 --restarts " << restarts << " " << RESUME_PROGRAM << " " << folder.string()
          << " " << step << " " << signal << " " << worker << " 2>&1";
  return run(command.str());
}

struct Loss {
  int step, signal, worker;
};

class ResumeWorkers : public testing::TestWithParam<Loss> {
 protected:
  static void SetUpTestSuite() {
    undisturbed = lockstep::fresh_folder("resume_workers", "undisturbed");
    const auto ended = run_job(undisturbed, -1, 0, 0, 0);
    ASSERT_EQ(ended.status, 0) << ended.output;
    ASSERT_EQ(ended.output, "[0] epochs in the history: 4\n");
  }
  static inline fs::path undisturbed;
};

TEST_P(ResumeWorkers, TheJobGoesOnFromItsCheckpointWithTheSameBits) {
  const auto [step, signal, worker] = GetParam();
  const auto folder =
      lockstep::fresh_folder("resume_workers", "step" + std::to_string(step) + "_signal" + std::to_string(signal) +
                                                   "_worker" + std::to_string(worker));
  const auto ended = run_job(folder, step, signal, worker, 1);
  EXPECT_EQ(ended.status, 0) << ended.output;
  EXPECT_NE(ended.output.find("lockstep run: restart 1 of 1"), std::string::npos) << ended.output;
  if (signal == SIGKILL) {
    EXPECT_NE(ended.output.find("lockstep run: rank " + std::to_string(worker) + " was ended by signal 9"),
              std::string::npos)
        << ended.output;
  }
  EXPECT_TRUE(contents(folder / "final.safetensors") == contents(undisturbed / "final.safetensors"));
  EXPECT_EQ(contents(folder / "log.csv"), contents(undisturbed / "log.csv"));
}

// Interrupted: all workers agree on the step, and the chief saves it.
INSTANTIATE_TEST_SUITE_P(AtAnyStep, ResumeWorkers,
                         testing::Values(Loss{2, SIGKILL, 1}, Loss{8, SIGKILL, 0}, Loss{14, SIGKILL, 1},
                                         Loss{19, SIGKILL, 0}, Loss{5, SIGTERM, 1}, Loss{16, SIGINT, 0}),
                         [](const auto& loss) {
                           return "step_" + std::to_string(loss.param.step) + "_signal_" +
                                  std::to_string(loss.param.signal) + "_worker_" + std::to_string(loss.param.worker);
                         });

}  // namespace
