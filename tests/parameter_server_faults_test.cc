// Jobs with parameter servers whose workers are lost: each step is counted once, and applied once on every shard.
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdio>
#include <filesystem>
#include <random>
#include <thread>

#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "tests/processes/processes.h"

namespace lockstep {
namespace {

constexpr int kEpochs = 4, kSteps = 50 * kEpochs;

Process run(const std::vector<std::string>& options, const std::vector<std::string>& arguments,
            const char* program = PARAMETER_SERVER_PROGRAM) {
  std::vector<std::string> command{"/bin/sh", "-c", "exec \"$@\" 2>&1", "sh", LOCKSTEP_CLI, "run"};
  command.insert(command.end(), options.begin(), options.end());
  command.emplace_back(program);
  command.insert(command.end(), arguments.begin(), arguments.end());
  return Process(command);
}

// Each shard keeps a count for each batch: of the updates that the batch has made there.
std::string expected() {
  return text("[chief] steps ", kSteps, ", updates by a batch ", kEpochs, " to ", kEpochs, ", of a shard ", kSteps, " ",
              kSteps, "\n");
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
  EXPECT_NE(job.text().find("worker 1 was ended by signal 9 (Killed); the job goes on without it"), std::string::npos)
      << job.text();
}

TEST(ParameterServerFaults, AKilledWorkerComesBack) {
  auto job = run({"--workers", "1", "--ps", "1", "--restarts", "1"}, {std::to_string(kEpochs), "2", "0", "20"});
  expect_all_steps(job);
}

// The signal comes while servers make the updates, which takes longer, and the worker waits for their answers.
Process run_with_signal_in_mid_push(int signal) {
  return run({"--workers", "2", "--ps", "2", "--grace", "1", "-x", "UPDATE_MS=40", "-x", "SIGNAL_AFTER_MS=20"},
             {"1", "2", "1", "5", std::to_string(signal)});
}

void expect_one_epoch(Process& job) {
  const auto& output = job.wait_for_end(120);
  EXPECT_NE(output.find("[chief] steps 50, updates by a batch 1 to 1, of a shard 50 50\n"), std::string::npos)
      << output;
}

TEST(ParameterServerFaults, AWorkerThatIsKilledInMidPush) {
  auto job = run_with_signal_in_mid_push(SIGKILL);
  expect_one_epoch(job);
}

// A stopped worker is lost when it has not answered for 20 to 40 s: both jobs wait for that at the same time.
TEST(ParameterServerFaults, AStoppedWorkersStepsAreMadeByTheOthers) {
  auto between_pushes = run({"--workers", "2", "--ps", "2", "--grace", "1"},
                            {std::to_string(kEpochs), "2", "1", "20", std::to_string(SIGSTOP)});
  auto in_mid_push = run_with_signal_in_mid_push(SIGSTOP);
  expect_all_steps(between_pushes, 120);
  expect_one_epoch(in_mid_push);
}

// The process id of "worker 1", which it has printed.
int process_of(Process& job, const std::string& name) {
  const auto line = text("[", name == "chief 0" ? "chief" : name, "] ", name, " at ");
  const auto& printed = job.wait_for_line(line, 30);
  const auto at =
      printed.rfind("\n" + line) == std::string::npos ? printed.rfind(line) : printed.rfind("\n" + line) + 1;
  return std::stoi(printed.substr(at + line.size()));
}

void wait_to_choose_a_moment(std::mt19937& random) {
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 700'000));
}

// A job with a chief, three workers and two servers, which saves every 20 steps.
Process run_with_backups(const std::string& name, const std::vector<std::string>& variables = {}) {
  const auto folder = fresh_folder("parameter_server_faults", name);
  std::vector<std::string> options{"--workers", "3", "--ps", "2", "--restarts", "5", "-x", "BACKUP=" + folder.string()};
  for (const auto& variable : variables) options.insert(options.end(), {"-x", variable});
  return run(options, {std::to_string(kEpochs), "5"});
}

// Updates since the last checkpoint may be lost, and none is made twice.
void expect_few_lost_updates(Process& job) {
  const auto& output = job.wait_for_end(60);
  EXPECT_TRUE(WIFEXITED(job.status()) && WEXITSTATUS(job.status()) == 0) << output;
  const auto at = output.find("[chief] steps ");
  ASSERT_NE(at, std::string::npos) << output;
  int steps = 0, fewest = 0, most = 0, of_shard[2] = {};
  ASSERT_EQ(std::sscanf(output.c_str() + at, "[chief] steps %d, updates by a batch %d to %d, of a shard %d %d", &steps,
                        &fewest, &most, &of_shard[0], &of_shard[1]),
            5)
      << output;
  EXPECT_EQ(steps, kSteps) << output;
  EXPECT_LE(most, kEpochs) << output;
  for (const int updates : of_shard) {
    EXPECT_LE(updates, kSteps) << output;
    EXPECT_GE(updates, kSteps - 60) << output;  // one checkpoint may be on its way when the server is killed
  }
}

TEST(ParameterServerFaults, WithoutAnyAllStepsAreCountedWhileCheckpointsAreWritten) {
  auto job = run_with_backups("none");
  expect_all_steps(job);
}

TEST(ParameterServerFaults, AKilledServerComesBackWithTheLastCheckpoint) {
  auto job = run_with_backups("server");
  const int server = process_of(job, "ps 1");
  std::mt19937 random(1);
  wait_to_choose_a_moment(random);
  kill(server, SIGKILL);
  expect_few_lost_updates(job);
  EXPECT_NE(job.text().find("ps 1 was started again: its shards of model number 0 are those of the checkpoint"),
            std::string::npos)
      << job.text();
}

TEST(ParameterServerFaults, AKilledChiefGoesOnFromTheLastCheckpoint) {
  auto job = run_with_backups("chief");
  const int chief = process_of(job, "chief 0");
  std::mt19937 random(2);
  wait_to_choose_a_moment(random);
  kill(chief, SIGKILL);
  expect_all_steps(job);
}

TEST(ParameterServerFaults, AServerWithoutACheckpointEndsTheJob) {
  auto job = run({"--workers", "1", "--ps", "1", "--restarts", "1"}, {std::to_string(kEpochs), "5"});
  const int server = process_of(job, "ps 0");
  job.wait_for_line("[chief] trains", 30);
  kill(server, SIGKILL);
  const auto& output = job.wait_for_end(60);
  EXPECT_NE(output.find("there is no checkpoint from which to restore its shards"), std::string::npos) << output;
  EXPECT_FALSE(WIFEXITED(job.status()) && WEXITSTATUS(job.status()) == 0);
}

TEST(ParameterServerFaults, AKilledWorkersScheduledStepsAreComputedOnce) {
  auto job =
      run({"--workers", "3", "--ps", "2", "--restarts", "1", "-x", "COORDINATOR=1"}, {std::to_string(kEpochs), "5"});
  const int worker = process_of(job, "worker 1");
  std::mt19937 random(3);
  wait_to_choose_a_moment(random);
  kill(worker, SIGKILL);
  const auto& output = job.wait_for_end(60);
  EXPECT_NE(output.find("[chief] returned 20100, added 20100\n"), std::string::npos) << output;
}

// A loop with a ClusterCoordinator that saves after every 20 of its 200 steps, once it has saved.
Process run_loop_with_backups(const std::string& name, const std::vector<std::string>& variables = {}) {
  auto all = variables;
  all.emplace_back("COORDINATOR=1");
  auto job = run_with_backups(name, all);
  job.wait_for_line("[chief] saved", 30);
  return job;
}

// The loop's steps add the numbers from 1 to 200. Those since a checkpoint may be lost: at most 20 of them.
void expect_sum(Process& job, bool may_lose) {
  const auto& output = job.wait_for_end(60);
  const std::string added = ", added ";
  const auto at = output.rfind(added);
  ASSERT_NE(at, std::string::npos) << output;
  const int sum = std::stoi(output.substr(at + added.size()));
  EXPECT_LE(sum, 20100) << output;
  EXPECT_GE(sum, may_lose ? 20100 - 20 * 200 : 20100) << output;
}

TEST(ParameterServerFaults, AKilledChiefsLoopGoesOnFromItsLastCheckpoint) {
  auto job = run_loop_with_backups("loop's chief");
  std::mt19937 random(4);
  wait_to_choose_a_moment(random);
  kill(process_of(job, "chief 0"), SIGKILL);
  expect_sum(job, false);
  EXPECT_NE(job.text().find("chief was ended by signal 9"), std::string::npos) << job.text();
}

TEST(ParameterServerFaults, AKilledServersLoopGoesOnFromItsLastCheckpoint) {
  for (const int copies : {1, 2}) {
    auto job = run_loop_with_backups(text("loop's server ", copies), {text("COPIES=", copies)});
    std::mt19937 random(5);
    wait_to_choose_a_moment(random);
    kill(process_of(job, "ps 0"), SIGKILL);
    expect_sum(job, copies == 1);
    EXPECT_NE(job.text().find("ps 0 was started again: its shards of model number 0"), std::string::npos) << job.text();
  }
}

TEST(ParameterServerFaults, AKilledServerWithSecondCopiesLosesNothing) {
  for (const char* const synchronous : {"0", "1"}) {
    auto job = run(
        {"--workers", "3", "--ps", "3", "--restarts", "2", "-x", "COPIES=2", "-x", text("SYNCHRONOUS=", synchronous)},
        {std::to_string(kEpochs), "5"});
    const int server = process_of(job, "ps 1");
    job.wait_for_line("[chief] trains", 30);
    kill(server, SIGKILL);
    expect_all_steps(job);
    EXPECT_NE(job.text().find("ps 1 was started again: its shards of model number 0 are those of ps 2"),
              std::string::npos)
        << job.text();
    EXPECT_NE(job.text().find("its second copies of ps 0's shards of model number 0 are those of ps 0"),
              std::string::npos)
        << job.text();
  }
}

// Both copies are lost: the last checkpoint has them.
TEST(ParameterServerFaults, BothCopiesThatAreKilledComeBackWithTheLastCheckpoint) {
  auto job = run_with_backups("both copies", {"COPIES=2"});
  const int first = process_of(job, "ps 0"), second = process_of(job, "ps 1");
  job.wait_for_line("[chief] trains", 30);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  kill(first, SIGKILL);
  kill(second, SIGKILL);
  expect_few_lost_updates(job);
  EXPECT_NE(job.text().find("of model number 0 are those of the checkpoint"), std::string::npos) << job.text();
}

// Any process is killed at any moment, or stopped for up to a second. That may be between the pushes of one step to two
// servers, or between the files of a checkpoint. Trainings are asynchronous or synchronous, and loops of their own,
// with one or two copies of each shard. LOCKSTEP_FAULT_ROUNDS: how many.
TEST(ParameterServerFaults, RandomFaultsInSeededRounds) {
  const char* const asked = std::getenv("LOCKSTEP_FAULT_ROUNDS");
  const int rounds = asked == nullptr ? 6 : std::atoi(asked);
  for (int seed = 0; seed < rounds; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const bool copies = seed % 2 == 1, loop = seed % 3 == 2, synchronous = seed % 3 == 1, stop = random() % 3 == 0;
    const int rank = static_cast<int>(random() % 6);
    const auto name = rank == 0 ? "chief 0" : rank < 4 ? text("worker ", rank - 1) : text("ps ", rank - 4);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << name << (stop ? " is stopped" : " is killed")
                                    << (loop          ? " in a loop"
                                        : synchronous ? ", synchronous"
                                                      : "")
                                    << (copies ? ", two copies" : ""));
    const auto begin = loop ? run_loop_with_backups : run_with_backups;
    auto job =
        begin(text("round ", seed), {text("COPIES=", copies ? 2 : 1), text("SYNCHRONOUS=", synchronous ? 1 : 0)});
    const int process = process_of(job, name);
    wait_to_choose_a_moment(random);
    kill(process, stop ? SIGSTOP : SIGKILL);
    if (stop) {
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 1000));
      kill(process, SIGCONT);
    }
    const bool may_lose = rank >= 4 && !copies && !stop;
    if (loop) {
      expect_sum(job, may_lose);
    } else {
      may_lose ? expect_few_lost_updates(job) : expect_all_steps(job);
    }
  }
}

// 3,072 MiB of values, where each process may have 1,536 MiB of memory of its own; with a checkpoint on the way.
TEST(LargeTable, TwiceAsLargeAsTheMemoryOfAProcessTrainsOnThreeServers) {
  const auto folder = fresh_folder("parameter_server_faults", "large");
  auto job = run({"--workers", "2", "--ps", "3"}, {"786432", "1024", "8192", "1", "1536", folder.string(), "50"},
                 LARGE_TABLE_PROGRAM);
  const auto& output = job.wait_for_end(300);
  EXPECT_NE(output.find("steps 96, rows from 1 to 1\n"), std::string::npos) << output;
}

// A job with a large table, once it trains and has saved a checkpoint.
Process begin_with_table(const std::vector<std::string>& options, const std::string& name) {
  const auto folder = fresh_folder("parameter_server_faults", name);
  auto job = run(options, {"200000", "128", "2000", "4", "0", folder.string(), "20"}, LARGE_TABLE_PROGRAM);
  for (int i = 0; i < 3000 && !std::filesystem::exists(folder / "backup.safetensors"); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(std::filesystem::exists(folder / "backup.safetensors"));
  return job;
}

TEST(LargeTable, AKilledWorkersStepsUpdateRowsOnce) {
  auto job = begin_with_table({"--workers", "2", "--ps", "2"}, "worker");
  kill(process_of(job, "worker 1"), SIGKILL);
  const auto& output = job.wait_for_end(120);
  EXPECT_NE(output.find("steps 400, rows from 4 to 4\n"), std::string::npos) << output;
  EXPECT_NE(output.find("worker 1 was ended by signal 9"), std::string::npos) << output;
}

TEST(LargeTable, AKilledServerWithSecondCopiesLosesNoUpdate) {
  auto job = begin_with_table({"--workers", "2", "--ps", "2", "--restarts", "1", "-x", "COPIES=2"}, "copies");
  kill(process_of(job, "ps 1"), SIGKILL);
  const auto& output = job.wait_for_end(120);
  EXPECT_NE(output.find("ps 1 was started again: its shards of model number 0 are those of ps 0"), std::string::npos)
      << output;
  EXPECT_NE(output.find("steps 400, rows from 4 to 4\n"), std::string::npos) << output;
}

// Its rows lack at most the updates since the last checkpoint.
TEST(LargeTable, AKilledServersRowsComeBackWithTheLastCheckpoint) {
  auto job = begin_with_table({"--workers", "2", "--ps", "2", "--restarts", "1"}, "server");
  kill(process_of(job, "ps 1"), SIGKILL);
  const auto& output = job.wait_for_end(120);
  EXPECT_NE(output.find("ps 1 was started again: its shards of model number 0 are those of the checkpoint"),
            std::string::npos)
      << output;
  EXPECT_TRUE(output.find("steps 400, rows from 3 to 4\n") != std::string::npos ||
              output.find("steps 400, rows from 4 to 4\n") != std::string::npos)
      << output;
}

}  // namespace
}  // namespace lockstep
