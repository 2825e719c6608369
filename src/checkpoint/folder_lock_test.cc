// Jobs that use one folder at a time.
#include "checkpoint/folder_lock.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "lockstep/base/error.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::checkpoint {
namespace {

namespace fs = std::filesystem;

TEST(FolderLock, OneHolderAtATime) {
  const auto folder = fresh_folder("checkpoint", "lock").string();
  const auto soon = [] { return Deadline::after(std::chrono::milliseconds(50)); };
  std::optional<FolderLock> first(std::in_place, folder, "backup.lock", soon());
  expect_says(message_of<IoError>([&] { FolderLock(folder, "backup.lock", soon()); }),
              "process " + std::to_string(::getpid()));
  EXPECT_NO_THROW(FolderLock(folder, "other.lock", soon()));
  first.reset();
  EXPECT_TRUE(fs::is_empty(folder));
  EXPECT_NO_THROW(FolderLock(folder, "backup.lock", soon()));
  std::ofstream(folder + "/backup.lock") << "left by one that was killed";
  EXPECT_NO_THROW(FolderLock(folder, "backup.lock", soon()));
}

// Jobs save into one folder at a time: the index has the checkpoints of all.
TEST(Checkpoint, JobsRecordIntoOneIndexAtTheSameTime) {
  const auto folder = fresh_folder("checkpoint", "jobs");
  constexpr int kJobs = 3, kSaves = 30;
  std::vector<pid_t> children;
  for (int job = 0; job < kJobs; ++job) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      std::vector<std::string> kept;
      for (int i = 0; i < kSaves; ++i) {
        const auto path = (folder / ("job" + std::to_string(job) + "-" + std::to_string(i))).string();
        write_archive(path, {});
        record_checkpoint(path, kept);
      }
      ::_exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  std::ifstream index(folder / "checkpoint");
  int lines = 0;
  for (std::string line; std::getline(index, line);) ++lines;
  EXPECT_EQ(lines, 1 + kJobs * kSaves);
}

}  // namespace
}  // namespace lockstep::checkpoint
