// Jobs with parameter servers whose workers are lost: each step is counted once, and applied once on every shard.
#include <gtest/gtest.h>
#include <signal.h>

#include <random>
#include <thread>

#include "base/text.h"
#include "tests/processes/processes.h"

namespace lockstep {
namespace {

constexpr int kEpochs = 4, kSteps = 50 * kEpochs;

Process run(const std::vector<std::string>& options, const std::vector<std::string>& arguments) {
  std::vector<std::string> command{"/bin/sh", "-c", "exec \"$@\" 2>&1", "sh", LOCKSTEP_CLI, "run"};
  command.insert(command.end(), options.begin(), options.end());
  command.push_back(PARAMETER_SERVER_PROGRAM);
  command.insert(command.end(), arguments.begin(), arguments.end());
  return Process(command);
}

// Each step's x was added once: the sums of the odd and of the even numbers up to 100, once an epoch.
std::string expected() {
  return text("[0] steps ", kSteps, ", sums ", (2500 + kSteps / kEpochs) * kEpochs, " ",
              (2550 + kSteps / kEpochs) * kEpochs, ", bias ", kSteps, "\n");
}

void expect_all_steps(Process& job, double seconds = 60) {
  const auto& output = job.wait_for_end(seconds);
  EXPECT_NE(output.find(expected()), std::string::npos) << output << "\nexpected " << expected();
  EXPECT_TRUE(WIFEXITED(job.status()) && WEXITSTATUS(job.status()) == 0) << output;
}

TEST(ParameterServerFaults, WithoutAnyAllStepsAreCounted) {
  auto job = run({"--workers", "2", "--ps", "2"}, {std::to_string(kEpochs), "0"});
  expect_all_steps(job);
}

TEST(ParameterServerFaults, AKilledWorkersStepsAreMadeByTheOthers) {
  auto job = run({"--workers", "2", "--ps", "2"}, {std::to_string(kEpochs), "2", "1", "20"});
  expect_all_steps(job);
  EXPECT_NE(job.text().find("rank 2 was ended by signal 9 (Killed); the job goes on without this worker"),
            std::string::npos)
      << job.text();
}

TEST(ParameterServerFaults, AKilledWorkerComesBack) {
  auto job = run({"--workers", "1", "--ps", "1", "--restarts", "1"}, {std::to_string(kEpochs), "2", "0", "20"});
  expect_all_steps(job);
}

TEST(ParameterServerFaults, AStoppedWorkersStepsAreMadeByTheOthers) {
  auto job = run({"--workers", "2", "--ps", "2", "--grace", "1"},
                 {std::to_string(kEpochs), "2", "1", "20", std::to_string(SIGSTOP)});
  expect_all_steps(job, 120);
}

// Workers are killed at any moment: also between the pushes of one step to two servers.
TEST(ParameterServerFaults, RandomKillsInSeededRounds) {
  const char* const asked = std::getenv("LOCKSTEP_FAULT_ROUNDS");
  const int rounds = asked == nullptr ? 3 : std::atoi(asked);
  for (int seed = 0; seed < rounds; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(static_cast<unsigned>(seed));
    auto job = run({"--workers", "3", "--ps", "2", "--restarts", "5"}, {std::to_string(kEpochs), "5"});
    const auto worker = random() % 3;
    const auto line = text("[", worker + 1, "] worker ", worker, " at ");
    const auto printed = job.wait_for_line(line, 30);
    const auto pid = std::stoi(printed.substr(printed.find(line) + line.size()));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 700'000));  // not to pass: to choose the moment
    kill(pid, SIGKILL);
    expect_all_steps(job);
  }
}

}  // namespace
}  // namespace lockstep
