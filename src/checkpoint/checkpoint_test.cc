#include "lockstep/checkpoint/checkpoint.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <random>
#include <set>
#include <sstream>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "checkpoint/state.h"
#include "lockstep/base/error.h"

namespace {

std::mutex flushed_folders_mutex;
std::set<ino_t> flushed_folders;
bool refuse_to_flush_folders = false;

}  // namespace

// Takes the C library's place: records the folders that are flushed, and refuses as some file systems do.
extern "C" int fsync(int descriptor) {
  struct stat info {};
  if (::fstat(descriptor, &info) == 0 && S_ISDIR(info.st_mode)) {
    if (refuse_to_flush_folders) {
      errno = EINVAL;
      return -1;
    }
    const std::lock_guard lock(flushed_folders_mutex);
    flushed_folders.insert(info.st_ino);
  }
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}

namespace lockstep::checkpoint {
namespace {

namespace fs = std::filesystem;

StoredTensor tensor_of(const std::vector<float>& values) {
  StoredTensor tensor{
      DType::float32, {static_cast<std::int64_t>(values.size())}, std::vector<std::byte>(values.size() * 4)};
  if (!values.empty()) std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  return tensor;
}

Archive sample(float value, std::size_t count = 100) {
  Archive archive;
  archive.tensors["a"] = tensor_of(std::vector<float>(count, value));
  archive.tensors["empty"] = tensor_of({});
  archive.tensors["scalar"] = {DType::int64, {}, std::vector<std::byte>(8, std::byte{1})};
  archive.entries["note"] = "quotes \" and \\ and \n and ünïcode";
  return archive;
}

void write_file(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

std::string little_endian(std::uint64_t value) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &value, 8);
  return bytes;
}

TEST(Archive, ReadsBackWhatWasWritten) {
  const auto path = (fresh_folder("checkpoint", "roundtrip") / "deep" / "er" / "file").string();
  const auto archive = sample(1.5);
  write_archive(path, archive);
  EXPECT_TRUE(fs::exists(path + ".safetensors"));
  for (const auto& name : {path, path + ".safetensors"}) {
    const auto read = read_archive(name);
    EXPECT_EQ(read.entries, archive.entries);
    ASSERT_EQ(read.tensors.size(), archive.tensors.size());
    for (const auto& [key, tensor] : archive.tensors) {
      EXPECT_EQ(read.tensor(key).dtype, tensor.dtype);
      EXPECT_EQ(read.tensor(key).shape, tensor.shape);
      EXPECT_EQ(read.tensor(key).bytes, tensor.bytes);
    }
  }
  EXPECT_THROW(archive.tensor("b"), InvalidArgument);
  EXPECT_THROW(archive.entry("b"), InvalidArgument);
}

TEST(Archive, ReadsFilesOfOthersWithoutChecksum) {
  const auto path = fresh_folder("checkpoint", "foreign") / "file.safetensors";
  const std::string header = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  write_file(path, little_endian(header.size()) + header + std::string(8, '\0'));
  EXPECT_EQ(read_archive(path.string()).tensor("w").shape, std::vector<std::int64_t>{2});
}

TEST(Archive, MalformedFilesAreErrors) {
  const auto folder = fresh_folder("checkpoint", "malformed");
  const std::vector<std::string> headers{
      "",
      "{",
      "[]",
      R"({"w":1})",
      R"({"w":{"dtype":"F32","shape":[2]}})",
      R"({"w":{"dtype":"X9","shape":[2],"data_offsets":[0,8]}})",
      R"({"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})",
      R"({"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})",
      R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})",
      R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,800]}})",
      R"({"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}})",
      R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
      R"({"__metadata__":{"a":1}})",
  };
  for (const auto& header : headers) {
    const auto path = folder / "file.safetensors";
    write_file(path, little_endian(header.size()) + header + std::string(8, '\0'));
    EXPECT_THROW(read_archive(path.string()), DataError) << header;
  }
  write_file(folder / "long.safetensors", little_endian(~std::uint64_t{0}) + "{}");
  EXPECT_THROW(read_archive((folder / "long").string()), DataError);
}

// A writer that is killed at any moment leaves the previous checkpoint, or the next one, whole.
TEST(Archive, AKilledWriterLeavesAWholeCheckpoint) {
  const auto path = (fresh_folder("checkpoint", "killed") / "ckpt").string();
  write_archive(path, sample(0, 200'000));
  std::mt19937 generator(1);
  for (int round = 0; round < 20; ++round) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      for (float value = 1;; value += 1) write_archive(path, sample(value, 200'000));
    }
    ::usleep(1000 + generator() % 20'000);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const auto archive = read_archive(path);
    const auto& bytes = archive.tensor("a").bytes;
    EXPECT_EQ(std::memcmp(bytes.data(), bytes.data() + 4, bytes.size() - 4), 0);  // all of one version
  }
}

TEST(Archive, AFolderThatCannotBeMadeIsNamed) {
  const auto folder = fresh_folder("checkpoint", "in_the_way");
  write_file(folder / "file", "x");
  try {
    write_archive((folder / "file" / "ckpt").string(), sample(1));
    FAIL();
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("file"), std::string::npos);
  }
}

// Two containers number their processes alike, and neither sees the other's.
TEST(Archive, TwoContainersSaveIntoOneFolder) {
  const auto path = (fresh_folder("checkpoint", "containers") / "ckpt").string();
  write_archive(path, sample(0, 200'000));
  std::vector<pid_t> children;
  for (int container = 0; container < 2; ++container) {
    const pid_t outer = ::fork();
    ASSERT_GE(outer, 0);
    if (outer == 0) {
      if (::unshare(CLONE_NEWPID) != 0) ::_exit(2);
      const pid_t inner = ::fork();
      if (inner == 0) {
        try {
          for (int i = 0; i < 100; ++i) write_archive(path, sample(static_cast<float>(container), 200'000));
        } catch (const std::exception& error) {
          std::fprintf(stderr, "%s\n", error.what());
          ::_exit(1);
        }
        ::_exit(0);
      }
      int status = 0;
      ::waitpid(inner, &status, 0);
      ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 3);
    }
    children.push_back(outer);
  }
  for (const pid_t child : children) {
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  const auto bytes = read_archive(path).tensor("a").bytes;
  EXPECT_EQ(std::memcmp(bytes.data(), bytes.data() + 4, bytes.size() - 4), 0);
  const auto folder = fs::directory_iterator(fs::path(path).parent_path());
  EXPECT_EQ(std::distance(fs::begin(folder), fs::end(folder)), 1);  // nothing is left beside it
}

TEST(Archive, WhatADeadWriterLeftIsRemovedAndALiveOnesIsNot) {
  const auto folder = fresh_folder("checkpoint", "stale");
  const auto live = folder / "ckpt.safetensors.tmp.4000001", dead = folder / "ckpt.safetensors.tmp.4000002";
  write_file(live, "x");
  write_file(dead, "x");
  const int descriptor = ::open(live.c_str(), O_RDWR);
  ASSERT_EQ(::flock(descriptor, LOCK_EX), 0);
  write_archive((folder / "ckpt").string(), sample(1));
  EXPECT_TRUE(fs::exists(live));
  EXPECT_FALSE(fs::exists(dead));
  ::close(descriptor);
}

TEST(Archive, FoldersThatWereMadeAreFlushedAndThoseThatCannotBeAreLeft) {
  const auto folder = fresh_folder("checkpoint", "flushed");
  const auto inode_of = [](const fs::path& path) {
    struct stat info {};
    EXPECT_EQ(::stat(path.c_str(), &info), 0);
    return info.st_ino;
  };
  flushed_folders.clear();
  write_archive((folder / "a" / "b" / "ckpt").string(), sample(1));
  for (const auto& made : {folder, folder / "a", folder / "a" / "b"}) {
    EXPECT_TRUE(flushed_folders.contains(inode_of(made))) << made;
  }
  refuse_to_flush_folders = true;
  EXPECT_NO_THROW(write_archive((folder / "c" / "ckpt").string(), sample(1)));
  refuse_to_flush_folders = false;
}

TEST(Archive, WhatTheFormatsReaderRefusesIsRefused) {
  const auto path = fresh_folder("checkpoint", "strict") / "file.safetensors";
  const auto message_of_header = [&](const std::string& header, std::size_t bytes) {
    write_file(path, little_endian(header.size()) + header + std::string(bytes, '\0'));
    return message_of<DataError>([&] { read_archive(path.string()); });
  };
  expect_says(message_of_header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                                R"("b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                                R"("c":{"dtype":"F32","shape":[2],"data_offsets":[16,24]}})",
                                24),
              "overlap");
  expect_says(message_of_header(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                                R"("b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})",
                                12),
              "gap");
  expect_says(message_of_header(R"({"a":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}})", 8), "shape");
  expect_says(message_of_header(R"({"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}})", 4), "shape");
  expect_says(message_of_header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0.0,8.0]}})", 8), "data_offsets");
  expect_says(message_of_header(R"( {"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8), "begin");
  expect_says(message_of_header(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                                R"("a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                                8),
              "gap");
  // Many names over one region: refused before memory is taken for any.
  std::string many = "{";
  constexpr int kBytes = 64 << 20;
  for (int i = 0; i < 2000; ++i) {
    many += (i == 0 ? "" : ",") + std::string("\"t") + std::to_string(i) + R"(":{"dtype":"U8","shape":[67108864],)" +
            R"("data_offsets":[0,67108864]})";
  }
  expect_says(message_of_header(many + "}", kBytes), "overlap");
}

TEST(Archive, TextThatIsNotUtf8IsAnError) {
  const auto path = (fresh_folder("checkpoint", "utf8") / "ckpt").string();
  auto archive = sample(1);
  archive.entries["kept"] = "name-\xff";
  expect_says(message_of<InvalidArgument>([&] { write_archive(path, archive); }), "UTF-8");
}

TEST(Archive, ANumberThatIsNoneIsNamed) {
  Archive archive;
  archive.entries = {{"steps", "12x"}, {"large", "99999999999999999999"}, {"good", "-7"}, {"loss", "0x1p+1 nonsense"}};
  EXPECT_EQ(archive.integer("good"), -7);
  expect_says(message_of<DataError>([&] { archive.integer("steps"); }), "\"steps\" is \"12x\"");
  expect_says(message_of<DataError>([&] { archive.integer("large"); }), "99999999999999999999");
  expect_says(message_of<DataError>([&] { archive.numbers("loss"); }), "nonsense");
}

// No exception of std::filesystem comes out.
TEST(Checkpoint, FoldersThatCannotBeReadAreNamed) {
  const auto folder = fresh_folder("checkpoint", "unreadable");
  fs::create_symlink("loop", folder / "loop");
  expect_says(message_of<IoError>([&] { latest_checkpoint((folder / "loop").string()); }), "loop");
  const auto gone = folder / "gone";
  fs::create_directory(gone);
  const auto before = fs::current_path();
  fs::current_path(gone);
  fs::remove(gone);
  const auto message = message_of<IoError>([] { write_archive("here", sample(1)); });
  fs::current_path(before);
  expect_says(message, "folder");
}

// A crafted checkpoint or index cannot make anything outside of its folder be deleted.
TEST(Checkpoint, NamesFromFilesAreNeverPaths) {
  const auto folder = fresh_folder("checkpoint", "crafted");
  const auto own = folder / "own";
  fs::create_directories(own / "a");
  write_archive((folder / "victim").string(), sample(1));
  const std::vector<std::string> crafted{"a/../../victim",
                                         "./../victim",
                                         "../victim",
                                         "a/./../../victim",
                                         (folder / "victim").string(),
                                         "..",
                                         ".",
                                         "",
                                         std::string("x\0y", 3)};
  Archive archive;
  for (std::size_t i = 0; i < crafted.size(); ++i) archive.entries["kept/" + std::to_string(i)] = crafted[i];
  EXPECT_EQ(load_kept(archive, "kept", own.string()), std::vector<std::string>{});

  std::string index = "model_checkpoint_path: \"../victim\"\n";
  for (const auto& name : crafted) index += "all_model_checkpoint_paths: \"" + name + "\"\n";
  write_file(own / "checkpoint", index);
  EXPECT_EQ(latest_checkpoint(own.string()), "");
  std::int64_t counter = 1;
  Checkpoint checkpoint({{"counter", track(counter)}});
  CheckpointManager manager(checkpoint, own.string(), {.max_to_keep = 1});
  manager.save();
  manager.save();
  EXPECT_TRUE(fs::exists(folder / "victim.safetensors"));
}

TEST(Checkpoint, SavesRestoresAndKeepsTheLast) {
  const auto folder = fresh_folder("checkpoint", "manager").string();
  std::int64_t counter = 7;
  Checkpoint checkpoint({{"counter", track(counter)}});
  CheckpointManager manager(checkpoint, folder, {.max_to_keep = 2});
  EXPECT_FALSE(manager.restore_or_initialize());
  EXPECT_EQ(latest_checkpoint(folder), "");
  for (counter = 1; counter <= 4; ++counter) manager.save();
  EXPECT_FALSE(fs::exists(folder + "/ckpt-2.safetensors"));
  EXPECT_TRUE(fs::exists(folder + "/ckpt-3.safetensors"));
  EXPECT_EQ(manager.latest(), folder + "/ckpt-4");

  counter = 0;
  Checkpoint again({{"counter", track(counter)}});
  CheckpointManager resumed(again, folder);
  EXPECT_TRUE(resumed.restore_or_initialize());
  EXPECT_EQ(counter, 4);
  EXPECT_EQ(resumed.save(), folder + "/ckpt-5");  // numbers go on
}

TEST(Checkpoint, TheIndexIsTensorFlows) {
  const auto folder = fresh_folder("checkpoint", "index");
  write_archive((folder / "a \"quoted\" name").string(), sample(1));
  std::vector<std::string> kept;
  record_checkpoint((folder / "a \"quoted\" name").string(), kept);
  std::ostringstream index;
  index << std::ifstream(folder / "checkpoint").rdbuf();
  EXPECT_EQ(
      index.str(),
      "model_checkpoint_path: \"a \\\"quoted\\\" name\"\nall_model_checkpoint_paths: \"a \\\"quoted\\\" name\"\n");
  EXPECT_EQ(latest_checkpoint(folder.string()), (folder / "a \"quoted\" name").string());
}

TEST(Checkpoint, ARestoreHappensWholeOrNotAtAll) {
  const auto path = (fresh_folder("checkpoint", "whole") / "ckpt").string();
  std::int64_t first = 1, second = 2;
  Checkpoint({{"first", track(first)}}).write(path);
  first = 10;
  Checkpoint both({{"first", track(first)}, {"second", track(second)}});
  EXPECT_THROW(both.restore(path), InvalidArgument);
  EXPECT_EQ(first, 10);
  EXPECT_EQ(second, 2);
}

TEST(State, PartsOfPartsAreSavedUnderTheirPrefixesAndLoadedTogether) {
  std::int64_t first = 1, second = 2;
  const auto state = compose({{"", compose({{"a", track(first)}})}, {"b", compose({{"c", track(second)}})}});
  const auto printed = print_state(state);
  EXPECT_EQ(archive_of(state).entries, (std::map<std::string, std::string>{{"a", "1"}, {"b/c", "2"}}));
  first = second = 0;
  const auto change = parse_state("a state", printed, state);
  EXPECT_EQ(first + second, 0);
  change();
  EXPECT_EQ(first, 1);
  EXPECT_EQ(second, 2);
}

}  // namespace
}  // namespace lockstep::checkpoint
