#include "checkpoint/shared_archive.h"

#include <fcntl.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <sstream>
#include <thread>

#include "base/file.h"
#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/own_files.h"
#include "lockstep/base/error.h"

namespace lockstep::checkpoint {
namespace fs = std::filesystem;

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::chrono::milliseconds kBetweenLooks(10);  // for another writer's word that it has finished
constexpr const char* kWord = ".part.";

std::size_t bytes_of(const NamedTensors& tensors) {
  std::size_t bytes = 0;
  for (const auto& [name, info] : tensors) bytes += info.bytes();
  return bytes;
}

// The file by which a writer tells its written part's checksum: "FILE.part.RANDOM-WRITER" for "FILE.tmp.RANDOM".
std::string word_of(const std::string& temporary, int writer) {
  const auto dot = temporary.rfind('.'), before = temporary.rfind('.', dot - 1);
  return text(temporary.substr(0, before), kWord, temporary.substr(dot + 1), "-", writer);
}

// Returns RANDOM from "RANDOM-WRITER", a word's name after its prefix, also while the word is written; else nothing.
std::string random_in(const std::string& name) {
  const auto digits = name.find_first_not_of("0123456789abcdef");
  if (digits == 0 || digits == std::string::npos || name[digits] != '-') return {};
  const auto end = name.find_first_not_of("0123456789", digits + 1);
  const bool is_word = end != digits + 1 && (end == std::string::npos || name.substr(end).starts_with(kTemporary));
  return is_word && has_random_form(name.substr(0, digits)) ? name.substr(0, digits) : "";
}

// Removes the words about files of `path` that are not there any more: their first writers were killed.
void remove_stale_words(const std::string& path) {
  const auto whole = absolute_path(path);
  const auto prefix = whole.filename().string() + kWord;
  std::error_code ended;
  for (fs::directory_iterator entry(whole.parent_path(), ended), end; !ended && entry != end; entry.increment(ended)) {
    const auto name = entry->path().filename().string();
    if (!name.starts_with(prefix)) continue;
    const auto random = random_in(name.substr(prefix.size()));
    std::error_code ignored;
    if (!random.empty() && entry->symlink_status(ignored).type() == fs::file_type::regular &&
        !fs::exists(text(whole.string(), kTemporary, random), ignored)) {
      fs::remove(entry->path(), ignored);
    }
  }
}

// Opens the folder first, since a network's file system may otherwise still take for missing what has come.
bool has_come(const std::string& word) {
  const FileDescriptor folder(::open(fs::path(word).parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  return file_exists(word);
}

}  // namespace

ByteRange part_of_writer(const NamedTensors& large, int writer, int writers) {
  const auto all = bytes_of(large);
  const auto cut = [&](int before) {
    const auto even = all / static_cast<std::size_t>(writers) * static_cast<std::size_t>(before);
    return before == writers ? all : std::min(all, (even + kPage - 1) / kPage * kPage);
  };
  return {cut(writer), cut(writer + 1)};
}

SharedArchive::SharedArchive(const std::string& path, Archive small, NamedTensors large)
    : path_(checkpoint_file(path)),
      small_(std::move(small)),
      large_(std::move(large)),
      file_(path_),
      temporary_(absolute_path(file_.temporary()).string()) {
  NamedTensors all;
  std::size_t small_bytes = 0;
  for (const auto& [name, tensor] : small_.tensors) {
    all.emplace_back(name, TensorInfo{tensor.dtype, tensor.shape});
    small_bytes += tensor.bytes.size();
  }
  all.insert(all.end(), large_.begin(), large_.end());
  header_ = print_header(small_.entries, all, kPage, small_bytes);
  large_begin_ = header_.size() + small_bytes;
  file_.write_at(0, std::as_bytes(std::span(header_)));  // so that the file is known as Lockstep's if it is left over
}

SharedArchive::~SharedArchive() {
  std::error_code ignored;
  for (int writer = 1; writer < writers_; ++writer) fs::remove(word_of(temporary_, writer), ignored);
}

void SharedArchive::finish(const Pieces& part, int writers, Deadline deadline) {
  writers_ = writers;
  auto crc = extend_crc(0, std::as_bytes(std::span(header_)));
  auto at = header_.size();
  Pieces mine;
  for (const auto& [name, tensor] : small_.tensors) mine.emplace_back(tensor.bytes);
  mine.insert(mine.end(), part.begin(), part.end());
  for (const auto& piece : mine) {
    file_.write_at(at, piece);
    at += piece.size();
    crc = extend_crc(crc, piece);
  }
  for (int writer = 1; writer < writers; ++writer) {
    crc = join_crcs(crc, checksum_of(writer, deadline), part_of_writer(large_, writer, writers).size());
  }
  set_checksum(header_, crc);
  file_.write_at(0, std::as_bytes(std::span(header_)));
  file_.commit();
  remove_stale_words(path_);
}

std::uint32_t SharedArchive::checksum_of(int writer, Deadline deadline) const {
  const auto word = word_of(temporary_, writer);
  while (!has_come(word)) {
    if (Deadline::Clock::now() >= abandoned_at_.load())
      throw IoError(text("cannot write ", path_, ": another worker did not write its part"));
    if (deadline.passed()) {
      throw IoError(text("cannot write ", path_, ": another worker did not write its part within ",
                         deadline.waited().count(), " s"));
    }
    std::this_thread::sleep_for(kBetweenLooks);
  }
  const auto said = read_small_file(word);
  std::uint32_t crc = 0;
  std::size_t bytes = 0;
  std::istringstream(said) >> crc >> bytes;
  const auto part = part_of_writer(large_, writer, writers_);
  if (bytes == part.size()) return crc;
  throw IoError(
      text("cannot write ", path_, ": writer ", writer, " says \"", said, "\" of its part of ", part.size(), " bytes"));
}

void write_part(const std::string& temporary, std::size_t large_begin, std::size_t begin, const Pieces& part,
                int writer) {
  std::uint32_t crc = 0;
  std::size_t bytes = 0;
  for (const auto& piece : part) {
    crc = extend_crc(crc, piece);
    bytes += piece.size();
  }
  write_to_file(temporary, large_begin + begin, part);
  const auto word = text(crc, " ", bytes);
  write_file_atomically(word_of(temporary, writer), Pieces{std::as_bytes(std::span(word))});
}

}  // namespace lockstep::checkpoint
