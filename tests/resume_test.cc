// A training that is killed, or interrupted, at any step and started again ends with the bits of one that never was.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/fresh_folder.h"

namespace {

namespace fs = std::filesystem;

struct Ended {
  int status = 0;
  std::string output;
};

Ended run_program(const fs::path& folder, int step, int signal) {
  std::ostringstream command;
  command << RESUME_PROGRAM << " " << folder.string() << " " << step << " " << signal << " 2>&1";
  FILE* pipe = ::popen(command.str().c_str(), "r");
  Ended ended;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) ended.output.push_back(static_cast<char>(c));
  ended.status = ::pclose(pipe);
  return ended;
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
  EXPECT_EQ(second.output, "epochs in the history: 4\n");
  EXPECT_TRUE(contents(folder / "final.safetensors") == contents(undisturbed / "final.safetensors"));
  EXPECT_EQ(contents(folder / "log.csv"), contents(undisturbed / "log.csv"));
  EXPECT_FALSE(fs::exists(folder / "backup" / "backup.safetensors"));
}

INSTANTIATE_TEST_SUITE_P(AtAnyStep, Resume,
                         testing::Values(std::pair(2, SIGKILL), std::pair(4, SIGKILL), std::pair(8, SIGKILL),
                                         std::pair(14, SIGKILL), std::pair(19, SIGKILL), std::pair(5, SIGTERM),
                                         std::pair(16, SIGINT)));

}  // namespace
