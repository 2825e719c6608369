// A save removes files of Lockstep's, and leaves files and folders of others.
#include "checkpoint/own_files.h"

#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <future>
#include <memory>
#include <optional>
#include <vector>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "checkpoint/files.h"
#include "checkpoint/files_testing.h"
#include "checkpoint/folder_lock.h"
#include "checkpoint/sharded_archive.h"
#include "lockstep/base/error.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRandom = "0123456789abcdef";

Archive small_archive(std::size_t bytes = 8) {
  Archive archive;
  archive.tensors["a"] = {DType::uint8, {static_cast<std::int64_t>(bytes)}, std::vector<std::byte>(bytes)};
  return archive;
}

// Every call that removes rows.
void remove_rows_of(const std::string& path) {
  write_archive(path, small_archive());
  remove_rows(path);
  { RowsFolder(path).keep(); }
  { const RowsFolder given_up(path); }
  remove_checkpoint(path);
}

TEST(OwnFiles, WhatOthersPutIntoTheFolderOfRowsStays) {
  const auto folder = fresh_folder("own_files", "rows");
  const auto path = (folder / "ckpt").string();
  const std::vector<fs::path> theirs{"notes.txt",
                                     "data/values.bin",
                                     fs::path(kRandom) / "theirs.bin",
                                     fs::path(kRandom) / "ps-0-of-1.safetensors",
                                     fs::path(kRandom) / "0.rows" / "more.txt",
                                     "20241128/photo.jpg"};
  for (const auto& file : theirs) put(folder / "ckpt.rows" / file, "of somebody");
  write_archive((folder / "ckpt.rows" / kRandom / "ps-1-of-2").string(), small_archive());
  remove_rows_of(path);
  for (const auto& file : theirs) EXPECT_EQ(contents_of(folder / "ckpt.rows" / file), "of somebody") << file;
  EXPECT_FALSE(fs::exists(folder / "ckpt.rows" / kRandom / "ps-1-of-2.safetensors"));
  EXPECT_FALSE(fs::exists(folder / "ckpt.safetensors"));
}

TEST(OwnFiles, LinksAreNeverFollowed) {
  const auto folder = fresh_folder("own_files", "links");
  const auto path = (folder / "ckpt").string();
  const auto victim = folder / "victim", file = victim / kRandom / "ps-0-of-1.safetensors";
  write_archive(file.string(), small_archive());
  fs::create_directories(folder / "ckpt.rows");
  fs::create_directory_symlink(victim / kRandom, folder / "ckpt.rows" / kRandom);
  remove_rows_of(path);
  EXPECT_TRUE(fs::exists(file));

  fs::remove_all(folder / "ckpt.rows");
  fs::create_directory_symlink(victim, folder / "ckpt.rows");
  write_archive(path, small_archive());
  remove_rows(path);
  expect_says(message_of<IoError>([&] { RowsFolder rows(path); }), "ckpt.rows: it is a symbolic link");
  remove_checkpoint(path);
  EXPECT_TRUE(fs::exists(file));
  EXPECT_TRUE(fs::is_symlink(folder / "ckpt.rows"));
}

TEST(OwnFiles, MaxToKeepRemovesOnlyWhatLockstepWrote) {
  const auto folder = fresh_folder("own_files", "kept");
  std::int64_t counter = 1;
  Checkpoint checkpoint({{"counter", track(counter)}});
  CheckpointManager manager(checkpoint, folder.string(), {.max_to_keep = 1});
  manager.save();
  put(folder / "ckpt-1.rows" / "results.txt", "mine");
  manager.save();  // removes ckpt-1
  EXPECT_FALSE(fs::exists(folder / "ckpt-1.safetensors"));
  EXPECT_EQ(contents_of(folder / "ckpt-1.rows" / "results.txt"), "mine");
  fs::rename(folder / "ckpt-2.safetensors", folder / "elsewhere");
  fs::create_symlink(folder / "elsewhere", folder / "ckpt-2.safetensors");
  manager.save();
  put(folder / "ckpt-3.safetensors", "mine");
  manager.save();
  EXPECT_TRUE(fs::is_symlink(folder / "ckpt-2.safetensors"));
  EXPECT_TRUE(fs::exists(folder / "elsewhere"));
  EXPECT_EQ(contents_of(folder / "ckpt-3.safetensors"), "mine");
}

// Savers remove PATH.rows while it is empty: another that is about to make its folder there makes both.
TEST(OwnFiles, SaversThatGiveUpDoNotDisturbOthers) {
  const auto path = (fresh_folder("own_files", "given_up") / "ckpt").string();
  const auto save = [&] {
    for (int i = 0; i < 300; ++i) const RowsFolder given_up(path);
  };
  std::vector<std::future<void>> savers(4);
  for (auto& saver : savers) saver = std::async(std::launch::async, save);
  for (auto& saver : savers) EXPECT_NO_THROW(saver.get());
  EXPECT_FALSE(fs::exists(rows_folder(path)));
}

TEST(OwnFiles, FoldersOfKilledSavesAreRemovedBeforeTheNextAndThoseOfLiveOnesAreNot) {
  const auto folder = fresh_folder("own_files", "killed_saves");
  const auto path = (folder / "ckpt").string();
  std::optional<RowsFolder> live(path);
  write_archive((live->folder() / "ps-0-of-1").string(), small_archive());
  const auto dead = folder / "ckpt.rows" / kRandom;
  write_archive((dead / "ps-0-of-1").string(), small_archive());
  put(dead / "ps-1-of-2.safetensors.tmp.0123456789abcdef", "half of it");
  put(dead / "save.lock", "process 12 on a host that is gone");
  RowsFolder next(path);
  EXPECT_FALSE(fs::exists(dead));
  EXPECT_TRUE(fs::exists(live->folder() / "ps-0-of-1.safetensors"));

  // The last checkpoint's rows stay until the next main file is written.
  Archive main;
  main.entries["rows/" + live->name() + "/ps-0-of-1.safetensors"] = "a[0:8]";
  write_archive(path, main);
  live->keep();
  const auto kept = live->folder();
  live.reset();
  std::optional<RowsFolder> third(path);
  EXPECT_TRUE(fs::exists(kept));
  write_archive(path, {});
  third->keep();
  EXPECT_FALSE(fs::exists(kept));
  EXPECT_TRUE(fs::exists(next.folder()));
}

// A disk of a megabyte.
TEST(OwnFiles, WhatAKilledWriterLeftGivesItsPlaceToTheNextSave) {
  const auto folder = fresh_folder("own_files", "small_disk");
  for (const char* const name : {"ckpt", "another"}) {
    ASSERT_EQ(mount("none", folder.c_str(), "tmpfs", 0, "size=1m"), 0);
    const std::shared_ptr<void> unmounted(nullptr, [&](void*) { umount2(folder.c_str(), MNT_DETACH); });
    write_archive((folder / name).string(), small_archive(700'000));
    const auto left = folder / (std::string(name) + ".safetensors.tmp." + kRandom);
    fs::rename(folder / (std::string(name) + ".safetensors"), left);
    fs::last_write_time(left, fs::file_time_type::clock::now() - std::chrono::hours(2));
    EXPECT_NO_THROW(write_archive((folder / "ckpt").string(), small_archive(700'000))) << name;
    EXPECT_FALSE(fs::exists(left));
  }
}

// A lock of another host may be unknown here.
TEST(OwnFiles, WhatAnotherPathsWriterWroteOfLateStays) {
  const auto folder = fresh_folder("own_files", "of_late");
  write_archive((folder / "another").string(), small_archive());
  const auto left = folder / (std::string("another.safetensors.tmp.") + kRandom);
  fs::rename(folder / "another.safetensors", left);
  write_archive((folder / "ckpt").string(), small_archive());
  EXPECT_TRUE(fs::exists(left));
}

// Two that write one path: the main file is the other's by the time that this one removes what is old.
TEST(OwnFiles, TheRowsThatTheMainFileListsStay) {
  const auto folder = fresh_folder("own_files", "two_writers");
  const auto path = (folder / "ckpt").string();
  fs::path kept;
  RowsFolder mine(path);
  {
    RowsFolder other(path);
    kept = other.folder() / "ps-0-of-1.safetensors";
    write_archive(kept.string(), small_archive());
    Archive main;
    main.entries["rows/" + other.name() + "/ps-0-of-1.safetensors"] = "a[0:8]";
    write_archive(path, main);
    other.keep();
  }
  mine.keep();
  EXPECT_TRUE(fs::exists(kept));
  remove_rows(path);
  EXPECT_TRUE(fs::exists(kept));
}

TEST(OwnFiles, ALiveWritersFolderAndLockStay) {
  const auto folder = fresh_folder("own_files", "live");
  const auto path = (folder / "ckpt").string();
  const RowsFolder live(path);
  write_archive((live.folder() / "ps-0-of-1").string(), small_archive());
  write_archive(path, small_archive());
  remove_rows(path);
  remove_checkpoint(path);
  EXPECT_TRUE(fs::exists(live.folder() / "ps-0-of-1.safetensors"));
  EXPECT_TRUE(fs::exists(live.folder() / "save.lock"));
}

TEST(OwnFiles, NamesThatAreLikeTemporaryOnesStay) {
  const auto folder = fresh_folder("own_files", "like_temporary");
  put(folder / "victim", "of somebody");
  const std::vector<std::string> theirs{"ckpt.safetensors.tmp.backup", "ckpt.safetensors.tmp.1",
                                        "ckpt.safetensors.tmp.",       "ckpt.safetensors.tmp.0123456789ABCDEF",
                                        "notes.tmp.0123456789abcdef",  "theirs.safetensors.tmp.0123456789abcdef"};
  for (const auto& name : theirs) put(folder / name, "of somebody");
  fs::create_symlink("victim", folder / "ckpt.safetensors.tmp.fedcba9876543210");
  fs::create_directories(folder / "ckpt.safetensors.tmp.1111111111111111");
  write_archive((folder / "ckpt").string(), small_archive());
  for (const auto& name : theirs) EXPECT_EQ(contents_of(folder / name), "of somebody") << name;
  EXPECT_EQ(contents_of(folder / "victim"), "of somebody");
  EXPECT_TRUE(fs::is_symlink(folder / "ckpt.safetensors.tmp.fedcba9876543210"));
  EXPECT_TRUE(fs::is_directory(folder / "ckpt.safetensors.tmp.1111111111111111"));
}

TEST(OwnFiles, ALockFileOfSomebodyElseIsNotWrittenOrRemoved) {
  const auto folder = fresh_folder("own_files", "locks");
  const auto lock = folder / "checkpoint.lock";
  const auto lock_it = [&] {
    FolderLock(folder.string(), "checkpoint.lock", Deadline::after(std::chrono::seconds(1)));
  };
  put(folder / "victim", "process 1 on h");
  for (const bool is_hard : {false, true}) {
    is_hard ? fs::create_hard_link(folder / "victim", lock) : fs::create_symlink("victim", lock);
    if (is_hard) lock_it();
    if (!is_hard) expect_says(message_of<IoError>(lock_it), "checkpoint.lock: it is a symbolic link");
    EXPECT_EQ(contents_of(folder / "victim"), "process 1 on h");
    EXPECT_TRUE(fs::remove(lock));
  }
  put(lock, "process this list later");
  lock_it();
  EXPECT_EQ(contents_of(lock), "process this list later");
  fs::remove(lock);
  ASSERT_EQ(mkfifo(lock.c_str(), 0600), 0);
  expect_says(message_of<IoError>(lock_it), "no regular file");
}

TEST(OwnFiles, AFileThatIsCalledCheckpointStays) {
  const auto folder = fresh_folder("own_files", "index");
  put(folder / "checkpoint", "my notes");
  std::vector<std::string> kept;
  write_archive((folder / "ckpt").string(), small_archive());
  expect_says(message_of<IoError>([&] { record_checkpoint((folder / "ckpt").string(), kept); }),
              "no list of checkpoints");
  EXPECT_EQ(contents_of(folder / "checkpoint"), "my notes");
}

TEST(OwnFiles, FoldersAndDevicesAreNotReplaced) {
  const auto folder = fresh_folder("own_files", "replaced");
  fs::create_directories(folder / "ckpt.safetensors");
  expect_says(message_of<IoError>([&] { write_archive((folder / "ckpt").string(), small_archive()); }),
              "it is a folder");
  fs::create_symlink("/dev/null", folder / "null.safetensors");
  expect_says(message_of<IoError>([&] { write_archive((folder / "null").string(), small_archive()); }),
              "no regular file");
  EXPECT_TRUE(fs::is_symlink(folder / "null.safetensors"));
}

TEST(OwnFiles, AFolderOfProgramsMustBeOnesOwn) {
  const auto folder = fresh_folder("own_files", "private");
  const auto check = [&] { require_private_folder("LOCKSTEP_CACHE", folder); };
  EXPECT_NO_THROW(check());
  for (const mode_t mode : {0777, 0775, 01777}) {
    ASSERT_EQ(chmod(folder.c_str(), mode), 0);
    expect_says(message_of<InvalidArgument>(check), "may be written by others");
  }
  ASSERT_EQ(chmod(folder.c_str(), 0755), 0);
  ASSERT_EQ(chown(folder.c_str(), 12345, 12345), 0);
  expect_says(message_of<InvalidArgument>(check), "belongs to user 12345");
}

}  // namespace
}  // namespace lockstep::checkpoint
