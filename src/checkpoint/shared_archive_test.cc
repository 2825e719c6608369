#include "checkpoint/shared_archive.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <thread>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "lockstep/base/error.h"

namespace lockstep::checkpoint {
namespace {

std::vector<std::byte> bytes_of(std::size_t count, int seed) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 7 + static_cast<std::size_t>(seed));
  return bytes;
}

// An archive, of which some tensors are large, and their bytes one after the other.
struct Example {
  Archive whole, small;
  NamedTensors large;
  std::vector<std::byte> bytes;
};

Example example(std::int64_t elements) {
  Example made;
  made.small.entries["step"] = "17";
  made.small.tensors["odd"] = {DType::uint8, {5}, bytes_of(5, 1)};
  made.small.tensors["empty"] = {DType::float32, {0, 3}, {}};
  made.whole = made.small;
  for (const auto& [name, dtype] : {std::pair("b", DType::float64), std::pair("a", DType::float32)}) {
    const TensorInfo info{dtype, {elements, 3}};
    made.large.emplace_back(name, info);
    const auto bytes = bytes_of(info.bytes(), 2);
    made.bytes.insert(made.bytes.end(), bytes.begin(), bytes.end());
    made.whole.tensors[name] = {dtype, info.shape, bytes};
  }
  return made;
}

void expect_equal(const Archive& a, const Archive& b) {
  EXPECT_EQ(a.entries, b.entries);
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (const auto& [name, tensor] : a.tensors) {
    EXPECT_EQ(tensor.shape, b.tensors.at(name).shape) << name;
    EXPECT_EQ(tensor.bytes, b.tensors.at(name).bytes) << name;
  }
}

class SharedArchives : public testing::Test {
 protected:
  const std::filesystem::path folder = fresh_folder("checkpoint", "shared");
  const std::string path = (folder / "one").string();
};

TEST_F(SharedArchives, SeveralWritersMakeTheFileOfOne) {
  for (const std::int64_t elements : {0, 1, 1000, 100'000}) {
    for (const int writers : {1, 2, 3, 7}) {
      SCOPED_TRACE(testing::Message() << elements << " rows, " << writers << " writers");
      const auto made = example(elements);
      SharedArchive archive(path, made.small, made.large);
      EXPECT_EQ(archive.large_begin() % 4096, 0U);
      const auto part = [&](int writer) {
        const auto range = part_of_writer(made.large, writer, writers);
        const auto bytes = std::span(made.bytes).subspan(range.begin, range.size());
        return Pieces{bytes.first(bytes.size() / 3), bytes.subspan(bytes.size() / 3)};
      };
      std::vector<std::jthread> others;
      for (int writer = 1; writer < writers; ++writer) {
        others.emplace_back([&, writer] {
          const auto begin = part_of_writer(made.large, writer, writers).begin;
          write_part(archive.temporary(), archive.large_begin(), begin, part(writer), writer);
        });
      }
      archive.finish(part(0), writers, Deadline::after(std::chrono::seconds(30)));
      expect_equal(read_archive(path), made.whole);
    }
  }
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++files;
  EXPECT_EQ(files, 1U);
}

TEST_F(SharedArchives, WithoutAPartTheFileBeforeStays) {
  const auto made = example(1000);
  write_archive(path, made.small);
  const auto finish = [&](bool abandons) {
    SharedArchive archive(path, made.small, made.large);
    if (abandons) archive.abandon();
    const auto seconds = std::chrono::milliseconds(abandons ? 60'000 : 50);
    archive.finish({std::span(made.bytes).first(part_of_writer(made.large, 0, 2).size())}, 2, Deadline::after(seconds));
  };
  expect_says(message_of<IoError>([&] { finish(true); }), "another worker did not write its part");
  expect_says(message_of<IoError>([&] { finish(false); }), "another worker did not write its part within 0.05");
  expect_equal(read_archive(path), made.small);
}

TEST_F(SharedArchives, AWriterThatCannotSaysWhy) {
  expect_says(message_of<IoError>([&] { write_part((folder / "none").string(), 4096, 0, {}, 1); }), "cannot open");
}

}  // namespace
}  // namespace lockstep::checkpoint
