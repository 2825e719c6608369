#include "checkpoint/sharded_archive.h"

#include <algorithm>
#include <sstream>

#include "base/text.h"
#include "checkpoint/files.h"
#include "lockstep/base/error.h"

namespace lockstep::checkpoint {
namespace fs = std::filesystem;

namespace {

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

void list_rows(Archive& main, const std::string& file, const std::vector<std::string>& names) {
  main.entries[kListedRows + file] = join(names, "\n");
}

std::map<std::string, std::vector<ListedRows>> listed_rows(const std::string& path,
                                                           const std::map<std::string, std::string>& entries) {
  const auto altered = [&](const std::string& name) {
    throw DataError(text(checkpoint_file(path), " lists \"", name, "\" among its files of rows"));
  };
  std::map<std::string, std::vector<ListedRows>> parts_of;
  const std::string prefix = kListedRows;
  for (const auto& [key, listed] : entries) {
    if (!key.starts_with(prefix)) continue;
    const auto file = path_inside(rows_folder(path), key.substr(prefix.size()));
    if (file.empty()) altered(key);
    std::istringstream names(listed);
    for (std::string name; std::getline(names, name);) {
      const auto bracket = name.rfind('['), colon = name.rfind(':');
      if (bracket == std::string::npos || colon == std::string::npos || colon < bracket || !name.ends_with(']'))
        altered(name);
      const auto begin = whole_number(name.substr(bracket + 1, colon - bracket - 1));
      const auto end = whole_number(name.substr(colon + 1, name.size() - colon - 2));
      if (!begin || !end || *begin < 0 || *end < *begin) altered(name);
      parts_of[name.substr(0, bracket)].push_back({*begin, *end, file, name});
    }
  }
  for (auto& [tensor, parts] : parts_of) {
    std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  }
  return parts_of;
}

fs::path tables_file(fs::path shards_file) {
  return shards_file.replace_filename("tables-" + shards_file.filename().string());
}

ShardedArchive::ShardedArchive(const std::string& path)
    : path_(path), main_(read_archive(path)), parts_(listed_rows(path, main_.entries)) {}

const StoredTensor& ShardedArchive::read(const ListedRows& part) {
  auto found = files_.find(part.file.string());
  if (found == files_.end()) found = files_.emplace(part.file.string(), read_archive(part.file.string())).first;
  const auto& tensor = found->second.tensor(part.name);
  if (rows_of(tensor) == part.end - part.begin) return tensor;
  throw DataError(text(part.file.string(), " has ", rows_of(tensor), " rows of ", part.name));
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
  std::erase_if(archive.entries, [](const auto& entry) { return entry.first.starts_with(kListedRows); });
  return archive;
}

}  // namespace lockstep::checkpoint
