// Checkpoints that are damaged, and files that are none: each is an error that names the file, and none ends or hangs
// the process.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <random>

#include "base/expect_says_testing.h"
#include "base/file.h"
#include "base/fresh_folder_testing.h"
#include "checkpoint/files_testing.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/sharded_archive.h"
#include "lockstep/base/error.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFolder = "0123456789abcdef";

StoredTensor rows(std::int64_t count, std::int64_t width) {
  return {DType::float32, {count, width}, std::vector<std::byte>(static_cast<std::size_t>(count * width * 4))};
}

std::string with_length(const std::string& header) {
  std::string length(8, '\0');
  const std::uint64_t size = header.size();
  std::memcpy(length.data(), &size, 8);
  return length + header;
}

// Writes a checkpoint: the rows of "kernel" [5, 2] in two files, and those of a table beside each. Returns the files
// with rows.
std::vector<fs::path> write_in_several_files(const fs::path& folder, const std::string& name) {
  const auto path = (folder / name).string();
  Archive main;
  main.entries["servers/steps"] = "3";
  main.tensors["bias"] = rows(1, 2);
  const auto place = rows_folder(path) / kFolder;
  std::vector<fs::path> files;
  for (int part = 0; part < 2; ++part) {
    Archive archive;
    const auto begin = part * 3, end = part == 0 ? 3 : 5;
    const auto stored = name_of_rows("kernel", begin, end);
    archive.tensors[stored] = rows(end - begin, 2);
    const auto file = name_of_part("ps", part, 2);
    write_archive((place / file).string(), archive);
    list_rows(main, std::string(kFolder) + "/" + file, {stored});
    Archive table;
    table.tensors["clicks"] = rows(part + 1, 4);
    write_archive(tables_file(place / file).string(), table);
    files.push_back(place / file);
    files.push_back(tables_file(place / file));
  }
  main.entries[kTablesFolder] = kFolder;
  main.entries[kTablesServers] = "2";
  write_archive(path, main);
  return files;
}

TEST(DamagedFiles, AWholeCheckpointInSeveralFilesIsReadAsOne) {
  const auto folder = fresh_folder("damaged_files", "whole");
  write_in_several_files(folder, "ckpt");
  const auto found = survey((folder / "ckpt").string());
  EXPECT_EQ(found.files.size(), 4U);
  EXPECT_EQ(found.tensors.at("kernel").shape, (std::vector<std::int64_t>{5, 2}));
  EXPECT_EQ(found.tensors.at("clicks").shape, (std::vector<std::int64_t>{3, 4}));
  EXPECT_EQ(found.tensors.at("bias").shape, (std::vector<std::int64_t>{1, 2}));
}

TEST(DamagedFiles, LatestCheckpointTakesNoneWithDamagedRows) {
  const auto folder = fresh_folder("damaged_files", "latest");
  const auto before = (folder / "before").string(), last = (folder / "last").string();
  std::vector<std::string> kept;
  write_in_several_files(folder, "before");
  record_checkpoint(before, kept);
  const auto files = write_in_several_files(folder, "last");
  record_checkpoint(last, kept);
  EXPECT_EQ(latest_checkpoint(folder.string()), last);
  std::mt19937 random(7);
  for (const auto& file : files) {
    const auto whole = contents_of(file);
    const auto expect_other = [&](const std::string& what) {
      const auto message = message_of<DataError>([&] { survey(last); });
      EXPECT_NE(message.find(file.filename().string()), std::string::npos) << what << ": " << message;
    };
    for (int i = 0; i < 40; ++i) {
      auto damaged = whole;
      const auto at = random() % whole.size();
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << random() % 8));
      put(file, damaged);
      expect_other("with byte " + std::to_string(at) + " altered");
      put(file, whole.substr(0, at));
      expect_other("cut at " + std::to_string(at));
    }
    put(file, whole + "x");
    expect_other("with a byte more");
    EXPECT_EQ(latest_checkpoint(folder.string()), before);
    fs::remove(file);
    expect_other("missing");
    EXPECT_EQ(latest_checkpoint(folder.string()), before);
    write_archive(file.string(), {});
    if (file.filename().string().starts_with("ps-")) expect_other("of something else");
    put(file, whole);
    EXPECT_EQ(latest_checkpoint(folder.string()), last);
  }
}

// A damaged header is read or refused, and nothing beyond it is believed.
TEST(DamagedFiles, AlteredHeadersWithoutAChecksumAreReadOrRefused) {
  const auto file = fresh_folder("damaged_files", "headers") / "file.safetensors";
  const std::string header =
      R"({"__metadata__":{"rows/x/y":"a[0:2]"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
      R"("b":{"dtype":"BOOL","shape":[],"data_offsets":[8,9]}})";
  std::mt19937 random(3);
  int refused = 0;
  for (int i = 0; i < 500; ++i) {
    auto altered = header;
    for (unsigned changes = 1 + random() % 3; changes > 0; --changes) {
      const auto at = random() % altered.size();
      if (random() % 2 == 0)
        altered[at] = static_cast<char>(random());
      else
        altered.insert(at, altered.substr(random() % altered.size(), random() % 20));
    }
    put(file, with_length(altered) + std::string(9, '\1'));
    for (const std::function<void()>& read :
         std::vector<std::function<void()>>{[&] { read_archive(file.string()); }, [&] { survey(file.string()); },
                                            [&] { ShardedArchive archive(file.string()); }}) {
      try {
        read();
      } catch (const DataError&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 750);
}

TEST(DamagedFiles, ADeepHeaderIsRefused) {
  const auto file = fresh_folder("damaged_files", "deep") / "file.safetensors";
  const std::size_t deep = 2'000'000;
  std::string objects;
  for (std::size_t i = 0; i < deep; ++i) objects += R"({"a":)";
  for (const auto& header : {objects, objects + "1" + std::string(deep, '}'),
                             R"({"a":{"dtype":"F32","shape":)" + std::string(deep, '[') + std::string(deep, ']') +
                                 R"(,"data_offsets":[0,0]}})",
                             R"({"__metadata__":)" + std::string(deep, '[')}) {
    put(file, with_length(header));
    for (const auto& read :
         std::vector<std::function<void()>>{[&] { read_archive(file.string()); }, [&] { survey(file.string()); }})
      expect_says(message_of<DataError>(read), "nested deeper");
  }
}

TEST(DamagedFiles, WhatIsNoRegularFileIsRefusedAtOnce) {
  const auto folder = fresh_folder("damaged_files", "special");
  ASSERT_EQ(mkfifo((folder / "fifo.safetensors").c_str(), 0600), 0);
  fs::create_symlink("/dev/zero", folder / "zero.safetensors");
  for (const auto& [name, kind] : {std::pair("fifo", "a FIFO"), std::pair("zero", "a device")}) {
    const auto path = (folder / name).string();
    for (const auto& read : std::vector<std::function<void()>>{[&] { read_archive(path); }, [&] { survey(path); },
                                                               [&] { read_small_file(path + ".safetensors"); }}) {
      expect_says(message_of<IoError>(read), std::string(name) + ".safetensors: it is " + kind);
    }
  }
  // A link to a file is followed. A file of holes is refused before memory is taken for all of it.
  write_archive((folder / "file").string(), {});
  fs::create_symlink("file.safetensors", folder / "link.safetensors");
  EXPECT_NO_THROW(read_archive((folder / "link").string()));
  put(folder / "holes.safetensors", "");
  fs::resize_file(folder / "holes.safetensors", std::uintmax_t{1} << 40);
  EXPECT_THROW(read_archive((folder / "holes").string()), DataError);
  EXPECT_THROW(survey((folder / "holes").string()), DataError);
  expect_says(message_of<IoError>([&] { read_small_file((folder / "holes.safetensors").string()); }), "more than");
}

}  // namespace
}  // namespace lockstep::checkpoint
