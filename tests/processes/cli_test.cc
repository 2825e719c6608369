// The command `lockstep` refuses wrong arguments, and says which and why.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "base/text.h"
#include "tests/processes/run_command.h"

namespace lockstep {
namespace {

// The text that `lockstep` prints for arguments that it refuses.
std::string refused(std::vector<std::string> arguments) {
  std::vector<std::string> command{"/bin/sh", "-c", "exec \"$@\" 2>&1", "sh", LOCKSTEP_CLI};
  command.insert(command.end(), arguments.begin(), arguments.end());
  Process process(command);
  const auto output = process.wait_for_end(kSoon);
  EXPECT_NE(exit_status(process), 0) << output;
  return output;
}

TEST(Cli, AnUnknownWordIsNamedWithItsNeighbours) {
  expect_has(refused({"rn", "-n", "2", "true"}),
             "lockstep: there is no command rn (near: run)\nUsage: lockstep COMMAND (");
  expect_has(refused({"--nodes"}), "lockstep: there is no option --nodes\nUsage: lockstep COMMAND (");
  const std::string usage = "\nUsage: lockstep run [OPTIONS] PROGRAM [ARGUMENTS]\nlockstep run --help lists them.\n";
  expect_has(refused({"run", "--nodes", "4", "true"}), "lockstep run: there is no option --nodes (near: --nnodes");
  expect_has(refused({"run", "--restart=4", "-n", "2", "true"}), "there is no option --restart (near: --restarts");
  expect_has(refused({"run", "-n", "2", "--bogus"}), "lockstep run: there is no option --bogus" + usage);
  expect_has(refused({"devices", "--all"}), "lockstep devices: there is no option --all");
  expect_has(refused({"devices", "all"}), "lockstep devices: there is no argument all");
  expect_has(refused({"bench", "collective"}), "lockstep bench: there is no command collective (near: collectives)");
  expect_has(refused({"compile-for", "v5e:2x4", "--bogus", "true"}),
             "lockstep compile-for: there is no option --bogus");
  expect_has(refused({}), "lockstep: a command is missing\nUsage: lockstep COMMAND (devices, inspect");
}

TEST(Cli, AnOptionWithoutItsValueIsRefused) {
  for (const std::string option : {"-H", "--hostfile", "--host-discovery", "--store", "--nnodes", "--log-dir", "--ssh"})
    expect_has(refused({"run", option, "", "true"}), option + ": its value is empty");
  expect_has(refused({"doctor", "-H", ""}), "-H: its value is empty");
}

TEST(Cli, TheChipsAreCheckedBeforeTheProgramRuns) {
  const auto output = refused({"compile-for", "bogus", "echo", "it ran"});
  expect_has(output, "compile-for: the chips are \"bogus\"; they must be named as libtpu does");
  EXPECT_EQ(output.find("it ran\n"), std::string::npos) << output;
}

TEST(Cli, ABenchmarkOfNothingIsRefused) {
  const auto bench = [](std::vector<std::string> options) {
    options.insert(options.begin(), {"bench", "collectives", "--backend", "threads"});
    return refused(options);
  };
  expect_has(bench({"--sizes", "4096,3"}), "--sizes has 3 bytes; all_reduce of 2 ranks and float32 needs at least 4");
  expect_has(bench({"all_gather", "--sizes", "4"}),
             "--sizes has 4 bytes; all_gather of 2 ranks and float32 needs at least 8");
  expect_has(bench({"--seconds", "-1"}), "--seconds is -1; it must be above 0");
  expect_has(bench({"--dtype", "bfloat16"}), "--dtype is bfloat16; it must be float32");
}

TEST(Nodes, ALauncherWithATokenDoesNotWarnOfHavingNone) {
  const auto token = testing::TempDir() + "/node_token";
  std::ofstream(token) << std::string(64, 'a');
  chmod(token.c_str(), S_IRUSR | S_IWUSR);
  const int port = 20'000 + getpid() % 10'000;
  Process job({"/bin/sh", "-c",
               text("a=$(hostname -I | cut -d' ' -f1); LOCKSTEP_TOKEN_FILE=", token, " exec ", LOCKSTEP_CLI,
                    " run --nnodes 1 --store ${a:-127.0.0.1}:", port, " true 2>&1")});
  const auto output = job.wait_for_end(kSoon);
  expect_has(output, "this node holds the store");
  EXPECT_EQ(output.find("without a token"), std::string::npos) << output;
}

}  // namespace
}  // namespace lockstep
