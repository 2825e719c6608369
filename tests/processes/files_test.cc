// Files that the command `lockstep` reads and writes.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "checkpoint/sharded_archive.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "tests/processes/run_command.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

fs::path fresh(const std::string& name) {
  const auto folder = fs::path(testing::TempDir()) / ("files_" + name);
  fs::remove_all(folder);
  fs::create_directories(folder);
  return folder;
}

Process inspect(const fs::path& path) {
  return Process({"/bin/sh", "-c", "exec \"$@\" 2>&1", "sh", LOCKSTEP_CLI, "inspect", path.string()});
}

TEST(Inspect, PrintsNumbersThatPeopleReadAndReadsTheFilesOfRows) {
  const auto path = fresh("inspect") / "ckpt";
  Archive main, part;
  main.set_numbers("loss", {0.1, -2.5, 1e-300});
  main.entries["note"] = "0x1 is no number of ours";
  part.tensors["kernel[0:3]"] = {DType::uint8, {3}, std::vector<std::byte>(3)};
  const std::string place = "0123456789abcdef/ps-0-of-1.safetensors";
  const auto file = checkpoint::rows_folder(path.string()) / place;
  write_archive(file.string(), part);
  checkpoint::list_rows(main, place, {"kernel[0:3]"});
  write_archive(path.string(), main);
  auto whole = inspect(path);
  const auto said = whole.wait_for_end(kSoon);
  expect_has(said, "whole, with 1 file(s) of rows");
  expect_has(said, "0.1 -2.5 1e-300\n");
  expect_has(said, "0x1 is no number of ours");
  expect_has(said, "[3]");
  fs::resize_file(file, fs::file_size(file) - 1);
  auto damaged = inspect(path);
  expect_has(damaged.wait_for_end(kSoon), "ps-0-of-1.safetensors is not a whole checkpoint");
  EXPECT_NE(exit_status(damaged), 0);
}

TEST(LogDir, ALinkOrAFifoInThePlaceOfALogIsNotWritten) {
  const auto folder = fresh("log_dir");
  std::ofstream(folder / "victim") << "of somebody";
  for (const bool is_link : {true, false}) {
    const auto log = folder / "rank-0.log";
    if (is_link)
      fs::create_symlink("victim", log);
    else
      ASSERT_EQ(mkfifo(log.c_str(), 0600), 0);
    auto job = run({"-n", "1", "--log-dir", folder.string()}, "echo hello");
    expect_has(job.wait_for_end(kSoon), is_link ? "it is a symbolic link" : "it is no regular file");
    EXPECT_NE(exit_status(job), 0);
    fs::remove(log);
  }
  EXPECT_EQ(fs::file_size(folder / "victim"), 11U);
}

}  // namespace
}  // namespace lockstep
