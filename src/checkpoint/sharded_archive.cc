#include "checkpoint/sharded_archive.h"

#include <algorithm>
#include <sstream>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/files.h"
#include "lockstep/base/error.h"

namespace lockstep::checkpoint {
namespace fs = std::filesystem;

namespace {

constexpr const char* kPrefix = "rows/";

std::int64_t rows_of(const StoredTensor& tensor) { return tensor.shape.empty() ? 1 : tensor.shape[0]; }

// Appends rows [begin, end) of `from`.
void append_rows(const StoredTensor& from, std::int64_t begin, std::int64_t end, StoredTensor& to) {
  const auto row = static_cast<std::int64_t>(from.bytes.size()) / std::max<std::int64_t>(1, rows_of(from));
  to.dtype = from.dtype;
  to.bytes.insert(to.bytes.end(), from.bytes.begin() + begin * row, from.bytes.begin() + end * row);
  const auto before = to.shape.empty() ? 0 : to.shape[0];
  to.shape = from.shape;
  if (!to.shape.empty()) to.shape[0] = before + end - begin;
}

}  // namespace

std::string name_of_rows(const std::string& tensor, std::int64_t begin, std::int64_t end) {
  return text(tensor, "[", begin, ":", end, "]");
}

std::string name_of_part(const std::string& process, int index, int count) {
  return text(process, "-", index, "-of-", count, ".safetensors");
}

fs::path rows_folder(const std::string& path) { return fs::path(checkpoint_file(path)).replace_extension(".rows"); }

void list_rows(Archive& main, const std::string& file, const std::vector<std::string>& names) {
  main.entries[kPrefix + file] = join(names, "\n");
}

void remove_rows_but(const std::string& path, const std::string& kept) {
  const auto folder = rows_folder(path);
  std::error_code failed;
  if (!file_exists(folder)) return;
  std::vector<fs::path> old;
  for (fs::directory_iterator entry(folder, failed), end; !failed && entry != end; entry.increment(failed)) {
    if (entry->path().filename() != kept) old.push_back(entry->path());
  }
  for (const auto& rows : old) {
    if (!failed) fs::remove_all(rows, failed);
  }
  if (failed) log_warning(text("cannot remove what is in ", folder.string(), ": ", failed.message()));
}

void remove_checkpoint(const std::string& path, std::error_code& failed) {
  fs::remove(checkpoint_file(path), failed);
  if (!failed) fs::remove_all(rows_folder(path), failed);
}

void remove_checkpoint(const std::string& path) {
  std::error_code failed;
  remove_checkpoint(path, failed);
  if (failed) throw IoError(text("cannot remove ", checkpoint_file(path), ": ", failed.message()));
}

ShardedArchive::ShardedArchive(const std::string& path) : path_(path), main_(read_archive(path)) {
  const auto altered = [&](const std::string& name) {
    throw DataError(text(checkpoint_file(path_), " lists \"", name, "\" among its files of rows"));
  };
  const std::string prefix = kPrefix;
  for (const auto& [key, listed] : main_.entries) {
    if (!key.starts_with(prefix)) continue;
    const auto file = path_inside(rows_folder(path_), key.substr(prefix.size()));
    if (file.empty()) altered(key);
    std::istringstream names(listed);
    for (std::string name; std::getline(names, name);) {
      const auto bracket = name.rfind('['), colon = name.rfind(':');
      if (bracket == std::string::npos || colon == std::string::npos || colon < bracket || !name.ends_with(']'))
        altered(name);
      const auto begin = whole_number(name.substr(bracket + 1, colon - bracket - 1));
      const auto end = whole_number(name.substr(colon + 1, name.size() - colon - 2));
      if (!begin || !end || *begin < 0 || *end < *begin) altered(name);
      parts_[name.substr(0, bracket)].push_back({*begin, *end, file.string(), name});
    }
  }
  for (auto& [tensor, parts] : parts_) {
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.begin < b.begin; });
  }
}

const StoredTensor& ShardedArchive::read(const Part& part) {
  auto found = files_.find(part.file);
  if (found == files_.end()) found = files_.emplace(part.file, read_archive(part.file)).first;
  const auto& tensor = found->second.tensor(part.name);
  if (rows_of(tensor) == part.end - part.begin) return tensor;
  throw DataError(text(part.file, " has ", rows_of(tensor), " rows of ", part.name));
}

StoredTensor ShardedArchive::rows(const std::string& tensor, std::int64_t begin, std::int64_t end) {
  StoredTensor result;
  auto at = begin;
  if (const auto whole = main_.tensors.find(tensor); whole != main_.tensors.end()) {
    at = std::min(end, rows_of(whole->second));
    if (at > begin) append_rows(whole->second, begin, at, result);
  }
  if (const auto listed = parts_.find(tensor); listed != parts_.end()) {
    for (const auto& part : listed->second) {
      if (part.begin > at || part.end <= at || at >= end) continue;
      const auto until = std::min(end, part.end);
      append_rows(read(part), at - part.begin, until - part.begin, result);
      at = until;
    }
  }
  if (at >= end) return result;
  throw InvalidArgument(text("the checkpoint ", checkpoint_file(path_), " has no row ", at, " of ", tensor));
}

Archive ShardedArchive::whole() {
  auto archive = main_;
  for (const auto& [tensor, parts] : parts_) archive.tensors[tensor] = rows(tensor, 0, parts.back().end);
  std::erase_if(archive.entries, [](const auto& entry) { return entry.first.starts_with(kPrefix); });
  return archive;
}

}  // namespace lockstep::checkpoint
