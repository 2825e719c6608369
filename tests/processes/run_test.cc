// `lockstep run`: what it starts, what it says, and that nothing is left.
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "base/text.h"
#include "tests/processes/run_command.h"
#include "tests/small_disk.h"

namespace lockstep {
namespace {

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

// The processes whose numbers stand after "at " in the lines.
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

TEST(Launch, ARankThatAbortsIsNamedWithItsLastLine) {
  auto job =
      run({"-n", "2"}, "[ $LOCKSTEP_RANK = 1 ] || exec sleep 1000; echo '  what():  no data' >&2; kill -ABRT $$");
  expect_has(job.wait_for_end(kSoon), "lockstep run: rank 1 was ended by signal 6 (Aborted): what():  no data\n");
}

TEST(Launch, OptionsAsOtherLaunchersTakeThemAndTheProgramsOwnAsTheyAre) {
  const std::vector<std::vector<std::string>> ways{
      {"-np", "2"}, {"-n2"}, {"-n", "2", "--"}, {"--grace=1", "-n2", "--"}};
  for (const auto& way : ways) {
    std::vector<std::string> command{LOCKSTEP_CLI, "run"};
    command.insert(command.end(), way.begin(), way.end());
    for (const auto* word : {"echo", "-np", "3", "--", "a"}) command.push_back(word);
    Process job(command);
    const auto output = job.wait_for_end(kSoon);
    expect_has(output, "[0] -np 3 -- a\n");
    expect_has(output, "[1] -np 3 -- a\n");
  }
}

TEST(Launch, ASignalThatEndsARankIsNamed) {
  auto job = run({"-n", "2"}, "[ $LOCKSTEP_RANK = 0 ] && kill -KILL $$; exec sleep 1000");
  expect_has(job.wait_for_end(kSoon), "lockstep run: rank 0 was ended by signal 9 (Killed)\n");
  EXPECT_EQ(exit_status(job), 128 + SIGKILL);
}

// Runs a job with a rank that ignores SIGTERM to its end, and returns the processes that it had.
std::vector<pid_t> end_a_deaf_job(const std::vector<std::string>& place, const std::string& folder) {
  auto options = place;
  options.insert(options.end(), {"--grace", "0.2"});
  auto job =
      run(options, text("trapped=", fresh_folder(folder) + "/trapped",
                        "; if [ $LOCKSTEP_RANK = 0 ]; then while [ ! -e $trapped ]; do sleep 0.01; done; exit 3; fi; "
                        "trap '' TERM; echo at $$; touch $trapped; while true; do sleep 1; done"));
  const auto processes = processes_in(job.wait_for_end(kSoon));
  EXPECT_EQ(exit_status(job), 3);
  return processes;
}

TEST(Launch, WhoDoesNotListenIsKilledAfterTheGraceTime) { EXPECT_TRUE(gone(end_a_deaf_job({"-n", "2"}, "grace"))); }

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

TEST(Launch, GoesOnWhileEnoughProcessesAreLeft) {
  const auto script = "[ $LOCKSTEP_RANK = 1 ] && kill -KILL $$; exec sleep 0.5";
  auto enough = run({"-n", "3", "--min-n", "2"}, script);
  expect_has(enough.wait_for_end(kSoon), "rank 1 was ended by signal 9 (Killed); the job goes on without it");
  EXPECT_EQ(exit_status(enough), 0) << enough.text();
  auto too_few = run({"-n", "3", "--min-n", "3"}, script);
  expect_has(too_few.wait_for_end(kSoon), "lockstep run: rank 1 was ended by signal 9 (Killed)");
  EXPECT_EQ(exit_status(too_few), 137) << too_few.text();
}

TEST(Launch, RestartsAsOftenAsItMay) {
  const auto folder = fresh_folder("restarts");
  const std::string script =
      "[ $LOCKSTEP_RANK = 0 ] || exec sleep 1000; echo attempt $LOCKSTEP_RESTART; "
      "[ $LOCKSTEP_RESTART = 2 ] && exit 0; exit 5";
  auto fails = run({"-n", "2", "--restarts", "1"}, script);
  expect_has(fails.wait_for_end(kSoon), "lockstep run: restart 1 of 1\n[0] attempt 1\n");
  EXPECT_EQ(exit_status(fails), 5);
  auto ends = run({"-n", "1", "--restarts", "3"}, script);
  expect_has(ends.wait_for_end(kSoon), "[0] attempt 2\n");
  EXPECT_EQ(exit_status(ends), 0);
}

// All hosts are this one. Each has a launcher, as others have, but without ssh.
TEST(LaunchOverHosts, RanksAreNumberedThroughAndKnowTheirHost) {
  auto job =
      run({"-H", "localhost:2,127.0.0.1:1"},
          "echo $LOCKSTEP_RANK of $LOCKSTEP_SIZE, $LOCKSTEP_LOCAL_RANK of $LOCKSTEP_LOCAL_SIZE on $LOCKSTEP_HOST");
  const auto& output = job.wait_for_end(kSoon);
  EXPECT_EQ(exit_status(job), 0);
  expect_has(output, "[0] 0 of 3, 0 of 2 on localhost\n");
  expect_has(output, "[1] 1 of 3, 1 of 2 on localhost\n");
  expect_has(output, "[2] 2 of 3, 0 of 1 on 127.0.0.1\n");
}

TEST(LaunchOverHosts, TheFirstFailureIsTheCommands) {
  auto job = run({"-H", "localhost,127.0.0.1"}, "[ $LOCKSTEP_RANK = 1 ] && { echo no >&2; exit 7; }; exec sleep 1000");
  const auto& output = job.wait_for_end(kSoon);
  EXPECT_EQ(exit_status(job), 7);
  expect_has(output, "\nlockstep run: rank 1 on 127.0.0.1 ended with status 7: no\n");
  EXPECT_EQ(output.find("lockstep run: "), output.rfind("lockstep run: ")) << output;  // said once
}

TEST(LaunchOverHosts, WhoDoesNotListenIsKilledAfterTheGraceTimeAndTheStatusIsTheFirstFailures) {
  const auto processes = end_a_deaf_job({"-H", "localhost:2"}, "grace_over_hosts");
  for (const auto process : processes) EXPECT_FALSE(exists(process));  // none is left when it ends
}

TEST(LaunchOverHosts, NothingOutlivesIt) {
  for (const int signal : {SIGKILL, SIGTERM, SIGINT}) {
    auto job = run({"-H", "localhost,127.0.0.1"}, kWithChild);
    job.wait_for_line("[0] ready", kSoon);
    job.wait_for_line("[1] ready", kSoon);
    const auto processes = processes_in(job.text());
    ASSERT_EQ(processes.size(), 4U);
    job.send(signal);
    job.wait_for_end(kSoon);
    EXPECT_TRUE(gone(processes)) << signal;
  }
}

// The rank that is waited for has ended, well: the others hear it at once.
TEST(LaunchOverHosts, ARankThatEndsWithoutComingIsNamed) {
  for (const auto& where : {std::vector<std::string>{"-n", "2"}, {"-H", "localhost,127.0.0.1"}}) {
    auto job = run(where, "[ $LOCKSTEP_RANK = 1 ] && exit 0; exec " + std::string(LOCKSTEP_CLI) + " doctor --examine");
    const auto& output = job.wait_for_end(kSoon);
    expect_has(output, "rank 1 has ended, and others wait for it");
  }
}

TEST(LaunchOverHosts, ARankMayStartTheJobAgain) {
  auto job = run({"-H", "localhost,127.0.0.1", "--restarts", "1"},
                 "echo attempt $LOCKSTEP_RESTART; exit $((1 - LOCKSTEP_RESTART))");
  expect_has(job.wait_for_end(kSoon), "[0] attempt 1\n");
  EXPECT_EQ(exit_status(job), 0);
}

TEST(Launch, TheTokenIsForTheUserAloneAndAnotherInEachLife) {
  auto job = run({"-n", "1", "--restarts", "1"},
                 "stat -L -c 'mode=%a' $LOCKSTEP_TOKEN_FILE; echo token=$(cat $LOCKSTEP_TOKEN_FILE); "
                 "cat /proc/$PPID/cmdline /proc/$PPID/environ /proc/$$/environ | tr '\\0' ' '; echo; "
                 "exit $((1 - LOCKSTEP_RESTART))");
  const auto& output = job.wait_for_end(kSoon);
  std::set<std::string> tokens;
  const std::string start = "[0] token=";
  for (auto at = output.find(start); at != std::string::npos; at = output.find(start, at + 1)) {
    tokens.insert(output.substr(at + start.size(), 64));
  }
  EXPECT_EQ(tokens.size(), 2U) << output;
  for (const auto& token : tokens) {
    EXPECT_EQ(token.find_first_not_of("0123456789abcdef"), std::string::npos) << token;
    EXPECT_EQ(output.find(token), output.rfind(token)) << "in the arguments or the environment";
  }
  expect_has(output, "[0] mode=400\n");
}

TEST(Launch, TimelinesOfAllRanksAreInOneFile) {
  const auto file = fresh_folder("timeline") + "/job.json";
  auto job = run({"-n", "3", "--timeline", file}, std::string(LOCKSTEP_CLI) + " doctor --examine || true");
  job.wait_for_end(kSoon);
  const auto timeline = nlohmann::json::parse(contents(file));
  std::map<int, int> messages;
  double earliest = 1e18, latest = 0;
  for (const auto& event : timeline["traceEvents"]) {
    if (event["ph"] != "X") continue;
    if (event["name"] == "send" || event["name"] == "recv") ++messages[event["tid"]];
    earliest = std::min(earliest, event["ts"].get<double>());
    latest = std::max(latest, event["ts"].get<double>());
  }
  // Rank 0 exchanged with both others, each of them with rank 0 alone.
  EXPECT_EQ(messages, (std::map<int, int>{{0, 2 * 41}, {1, 41}, {2, 41}}));
  EXPECT_GE(earliest, 0);
  EXPECT_LT(latest, 20e6);  // microseconds since one barrier
}

TEST(Doctor, SaysWhatProcessesHaveAndThatTheyReachEachOther) {
  Process doctor({LOCKSTEP_CLI, "doctor", "-n", "2"});
  const auto& output = doctor.wait_for_end(kSoon);
  expect_has(output, "[0] rank  cores  usable    memory");
  const bool well = output.find("PROBLEM") == std::string::npos;  // the machine may have one core
  EXPECT_EQ(exit_status(doctor), well ? 0 : 1);
  if (well) {
    expect_has(output, "all 2 processes reach each other");
  }
  const auto cores = std::thread::hardware_concurrency();
  Process crowd({LOCKSTEP_CLI, "doctor", "-H", text("localhost:", cores + 1)});
  expect_has(crowd.wait_for_end(60), text("PROBLEM: rank ", cores, " on "));
  EXPECT_EQ(exit_status(crowd), 1);
}

TEST(Launch, BadInputIsNamed) {
  const auto output = [](const std::vector<std::string>& arguments) {
    std::vector<std::string> command{"/bin/sh", "-c", "exec \"$@\" 2>&1", "sh", LOCKSTEP_CLI, "run"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    Process process(command);
    return process.wait_for_end(kSoon);
  };
  expect_has(output({"-n", "0", "true"}), "-n is 0; it must be at least 1");
  expect_has(output({"-n", "2", "--min-n", "3", "true"}),
             "--min-n is 3; it must be from 1 to the number of processes (2)");
  expect_has(output({"--max-n", "2", "true"}), "--max-n needs --host-discovery");
  expect_has(output({"--host-discovery", "true", "true"}), "--host-discovery needs --min-n");
  expect_has(output({"--host-discovery", "true", "--min-n", "3", "--max-n", "2", "true"}),
             "--max-n is 2, and 3 processes are to begin");
  expect_has(output({"--host-discovery", "exit 3", "--min-n", "1", "true"}),
             "--host-discovery exit 3: ended with status 3");
  expect_has(output({"--host-discovery", "true", "--min-n", "1", "true"}), "--host-discovery true names no host");
  expect_has(output({"--host-discovery", "echo host:many", "--min-n", "1", "true"}),
             "--host-discovery echo host:many, line 1: \"host:many\" has \"many\" slots");
  expect_has(output({"-H", "a:2", "--min-n", "3", "true"}), "it must be from 1 to the number of processes (2)");
  expect_has(output({"-n", "2"}), "there is no program to run");
  expect_has(output({"/nowhere/program"}), "cannot run /nowhere/program: No such file or directory");
  expect_has(output({"--restarts", "-1", "true"}), "--restarts is -1");
  expect_has(output({"--log-dir", "/proc/nowhere", "true"}), "cannot make /proc/nowhere");
  expect_has(output({"-H", "a:0", "true"}), "-H: \"a:0\" has \"0\" slots");
  expect_has(output({"-H", "localhost:1", "-n", "2", "true"}), "-n is 2; the hosts have 1 slots");
  expect_has(output({"--hostfile", "/nowhere/hosts", "true"}), "cannot read the hostfile /nowhere/hosts");
  expect_has(output({"--timeline", "/nowhere/file", "true"}), "cannot write the timeline /nowhere/file: No such file");
  expect_has(output({"-x", "NO_SUCH_VARIABLE", "true"}), "-x NO_SUCH_VARIABLE: there is no such variable here");
  expect_has(output({"-H", "nowhere.invalid", "true"}), "nowhere.invalid");
  expect_has(output({"--part"}), "no other launcher says what to run here");
}

// A job whose log can take no more goes on, says so, and does not end as if all were well.
TEST(Launch, AFullDiskUnderTheLogsIsSaid) {
  const auto folder = fresh_folder("full"), small = fresh_folder("full_disk"), log = folder + "/rank-1.log";
  const SmallDisk disk(small);
  for (const auto& file : {small + "/log", log}) std::ofstream(file).flush();
  disk.fill();
  ASSERT_EQ(mount((small + "/log").c_str(), log.c_str(), nullptr, MS_BIND, nullptr), 0);
  const std::shared_ptr<void> unmounted(nullptr, [&](void*) { umount2(log.c_str(), MNT_DETACH); });
  auto job = run({"-n", "2", "--log-dir", folder, "--restarts", "3"}, "echo a line; echo another");
  const auto& output = job.wait_for_end(kSoon);
  EXPECT_EQ(exit_status(job), 74);
  expect_has(output, "lockstep run: cannot write " + folder + "/rank-1.log: No space left on device");
  expect_has(output, "[1] another\n");
  EXPECT_EQ(output.find("restart"), std::string::npos) << output;
  EXPECT_EQ(contents(folder + "/rank-0.log"), "a line\nanother\n");
}

// fit's progress bar redraws its line so.
TEST(Launch, ALineIsRedrawnOnATerminalAlone) {
  const std::string script = "printf \"$LOCKSTEP_TERMINAL half\\r\"; printf 'whole\\n'";
  EXPECT_EQ(run({"-n", "1"}, script).wait_for_end(kSoon), "[0] 0 half\rwhole\n");
  const auto command = text(LOCKSTEP_CLI, " run -n 1 bash -c '", "printf \"$LOCKSTEP_TERMINAL half\\r\"; echo whole'");
  Process on_terminal({"/usr/bin/script", "-qec", command, "/dev/null"});
  EXPECT_EQ(on_terminal.wait_for_end(kSoon), "[0] 1 half\r\x1b[K[0] whole\r\n");
}

TEST(Launch, LongCommandsReachOtherHostsWhole) {
  const std::string word(100'000, 'w');
  auto job = run({"-H", "localhost:1"}, "echo " + word + " | wc -c");
  expect_has(job.wait_for_end(kSoon), "[0] 100001\n");
  EXPECT_EQ(exit_status(job), 0);
}

TEST(Launch, ASignalIsHeardWhileManyAreStarted) {
  auto job = Process({"/bin/sh", "-c", "ulimit -n $(ulimit -Hn); exec \"$@\" 2>&1", "sh", LOCKSTEP_CLI, "run", "-n",
                      "20000", "--grace", "2", "sh", "-c", "echo started; exec sleep 100"});
  usleep(500'000);
  const auto begin = Deadline::after(std::chrono::seconds(0));
  job.send(SIGTERM);
  job.wait_for_end(60);
  EXPECT_LT(begin.waited().count(), 15);
}

TEST(Launch, AHangupEndsTheJobAsAnyWishThatItShouldEndAndIsSaid) {
  for (const auto& where : {std::vector<std::string>{"-n", "1"}, {"-H", "localhost"}}) {
    auto job = run(where, "trap 'echo saved; exit 0' TERM; echo ready; while true; do sleep 0.05; done");
    job.wait_for_line("[0] ready", kSoon);
    job.send(SIGHUP);
    const auto& output = job.wait_for_end(kSoon);
    expect_has(output, "[0] saved\n");
    expect_has(output, "lockstep run: ended by signal 1 (Hangup)");
    EXPECT_EQ(exit_status(job), 129);
  }
}

// The process that ends what is left was killed: the launcher goes on.
TEST(Launch, LivesWithoutItsReaper) {
  auto job = run({"-n", "1"}, "echo ready; sleep 1; echo done");
  job.wait_for_line("[0] ready", kSoon);
  std::vector<pid_t> killed;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const auto process = std::atoi(entry.path().filename().c_str());
    const auto rest = contents(text("/proc/", process, "/stat"));
    const auto end = rest.rfind(')');
    if (process == 0 || end == std::string::npos) continue;
    std::istringstream words(rest.substr(end + 2));
    std::string state;
    pid_t parent = 0;
    words >> state >> parent;
    std::string command;
    std::getline(std::ifstream(text("/proc/", process, "/comm")), command);
    if (parent == job.pid() && command == "lockstep") killed.push_back(process);
  }
  ASSERT_EQ(killed.size(), 1U);  // the reaper is a copy of the launcher
  kill(killed[0], SIGKILL);
  const auto& output = job.wait_for_end(kSoon);
  expect_has(output, "[0] done\n");
  EXPECT_EQ(exit_status(job), 0);
}

}  // namespace
}  // namespace lockstep
