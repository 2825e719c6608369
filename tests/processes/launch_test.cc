// `lockstep run`: what it starts, what it says, and that nothing is left.
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/text.h"
#include "tests/processes/processes.h"

namespace lockstep {
namespace {

constexpr double kSoon = 20;

// `lockstep run <options> bash -c <script>`, both streams together.
Process run(const std::vector<std::string>& options, const std::string& script) {
  std::vector<std::string> command{"/bin/sh", "-c", "exec \"$@\" 2>&1", "sh", LOCKSTEP_CLI, "run"};
  command.insert(command.end(), options.begin(), options.end());
  for (const auto* word : {"bash", "-c"}) command.push_back(word);
  command.push_back(script);
  return Process(command);
}

// The exit status, of one that was not ended by a signal.
int exit_status(const Process& process) { return WIFEXITED(process.status()) ? WEXITSTATUS(process.status()) : -1; }

void expect_has(const std::string& output, const std::string& part) {
  EXPECT_NE(output.find(part), std::string::npos) << output;
}

std::string contents(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

std::string fresh_folder(const std::string& name) {
  const auto folder = testing::TempDir() + "/launch_" + name;
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder;
}

bool exists(pid_t process) { return kill(process, 0) == 0; }

// Waits for processes that were killed to be gone.
bool gone(const std::vector<pid_t>& processes) {
  const auto deadline = Deadline::after(std::chrono::seconds(10));
  while (!deadline.passed()) {
    if (std::none_of(processes.begin(), processes.end(), exists)) return true;
    usleep(1000);
  }
  return false;
}

// Those whose numbers stand behind "at " in the lines.
std::vector<pid_t> processes_in(const std::string& output) {
  std::vector<pid_t> all;
  std::istringstream words(output);
  for (std::string word; words >> word;) {
    if (word != "at") continue;
    pid_t process = 0;
    words >> process;
    all.push_back(process);
  }
  return all;
}

TEST(Launch, EachRankKnowsItsPlaceAndItsLinesSayIt) {
  const auto folder = fresh_folder("place");
  auto job =
      run({"-n", "3", "--log-dir", folder + "/logs"},
          "echo $LOCKSTEP_RANK of $LOCKSTEP_SIZE, $LOCKSTEP_LOCAL_RANK of $LOCKSTEP_LOCAL_SIZE here; echo no >&2; "
          "printf unfinished");
  const auto& output = job.wait_for_end(kSoon);
  EXPECT_EQ(exit_status(job), 0);
  for (int rank = 0; rank < 3; ++rank) {
    expect_has(output, text("[", rank, "] ", rank, " of 3, ", rank, " of 3 here\n"));
    expect_has(output, text("[", rank, "] no\n"));
    expect_has(output, text("[", rank, "] unfinished\n"));
    expect_has(contents(text(folder, "/logs/rank-", rank, ".log")), text(rank, " of 3"));
  }
}

TEST(Launch, TheFirstFailureIsTheCommandsAndEndsTheOthers) {
  auto job = run({"-n", "3"}, "[ $LOCKSTEP_RANK = 1 ] || exec sleep 1000; echo at last: my disk is full >&2; exit 7");
  const auto& output = job.wait_for_end(kSoon);
  EXPECT_EQ(exit_status(job), 7);
  expect_has(output, "lockstep run: rank 1 ended with status 7: at last: my disk is full\n");
}

TEST(Launch, ASignalThatEndsARankIsNamed) {
  auto job = run({"-n", "2"}, "[ $LOCKSTEP_RANK = 0 ] && kill -KILL $$; exec sleep 1000");
  expect_has(job.wait_for_end(kSoon), "lockstep run: rank 0 was ended by signal 9 (Killed)\n");
  EXPECT_EQ(exit_status(job), 128 + SIGKILL);
}

TEST(Launch, WhoDoesNotListenIsKilledAfterTheGraceTime) {
  const auto heard = fresh_folder("grace") + "/trapped";
  auto job = run({"-n", "2", "--grace", "0.2"},
                 text("trapped=", heard,
                      "; if [ $LOCKSTEP_RANK = 0 ]; then while [ ! -e $trapped ]; do sleep 0.01; done; exit 3; fi; "
                      "trap '' TERM; echo at $$; touch $trapped; while true; do sleep 1; done"));
  const auto processes = processes_in(job.wait_for_end(kSoon));
  EXPECT_EQ(exit_status(job), 3);
  EXPECT_TRUE(gone(processes));
}

const char* const kWithChild = "sleep 1000 & echo at $!; echo at $$; echo ready; wait";

TEST(Launch, NothingOutlivesIt) {
  for (const int signal : {SIGKILL, SIGTERM, SIGINT}) {
    auto job = run({"-n", "2"}, kWithChild);
    job.wait_for_line("[0] ready", kSoon);
    job.wait_for_line("[1] ready", kSoon);
    const auto processes = processes_in(job.text());
    ASSERT_EQ(processes.size(), 4U);
    job.send(signal);
    job.wait_for_end(kSoon);
    EXPECT_TRUE(gone(processes)) << signal;
    if (signal != SIGKILL) {
      EXPECT_EQ(exit_status(job), 128 + signal);
    }
  }
}

TEST(Launch, OneThatWritesWithoutEndIsEndedToo) {
  auto job = run({"-n", "1"}, "exec yes");
  job.wait_for_line("[0] y", kSoon);
  job.send(SIGTERM);
  job.wait_for_end(kSoon);
  EXPECT_EQ(exit_status(job), 128 + SIGTERM);
}

TEST(Launch, ARankThatEndsLeavesNothingBehind) {
  auto job = run({"-n", "1"}, "sleep 1000 >/dev/null 2>&1 & echo at $!");
  const auto processes = processes_in(job.wait_for_end(kSoon));
  EXPECT_EQ(exit_status(job), 0);
  EXPECT_TRUE(gone(processes));
}

TEST(Launch, RestartsAsOftenAsItMay) {
  const auto folder = fresh_folder("restarts");
  const std::string script =
      "[ $LOCKSTEP_RANK = 0 ] || exec sleep 1000; echo life $LOCKSTEP_RESTART; "
      "[ $LOCKSTEP_RESTART = 2 ] && exit 0; exit 5";
  auto fails = run({"-n", "2", "--restarts", "1"}, script);
  expect_has(fails.wait_for_end(kSoon), "lockstep run: restart 1 of 1\n[0] life 1\n");
  EXPECT_EQ(exit_status(fails), 5);
  auto ends = run({"-n", "1", "--restarts", "3"}, script);
  expect_has(ends.wait_for_end(kSoon), "[0] life 2\n");
  EXPECT_EQ(exit_status(ends), 0);
}

TEST(Launch, BadInputIsNamed) {
  const auto output = [](const std::vector<std::string>& arguments) {
    std::vector<std::string> command{"/bin/sh", "-c", "exec \"$@\" 2>&1", "sh", LOCKSTEP_CLI, "run"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    Process process(command);
    return process.wait_for_end(kSoon);
  };
  expect_has(output({"-n", "0", "true"}), "-n is 0; it must be at least 1");
  expect_has(output({"-n", "2"}), "there is no program to run");
  expect_has(output({"/nowhere/program"}), "cannot run /nowhere/program: No such file or directory");
  expect_has(output({"--restarts", "-1", "true"}), "--restarts is -1");
  expect_has(output({"--log-dir", "/proc/nowhere", "true"}), "cannot make /proc/nowhere");
}

}  // namespace
}  // namespace lockstep
