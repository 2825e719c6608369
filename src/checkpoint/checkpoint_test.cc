#include "lockstep/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "base/fresh_folder.h"
#include "lockstep/error.h"

namespace lockstep {
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

}  // namespace
}  // namespace lockstep
