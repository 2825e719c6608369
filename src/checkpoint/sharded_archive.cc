#include "checkpoint/sharded_archive.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <set>
#include <sstream>
#include <vector>

#include "base/file.h"
#include "base/log.h"
#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/own_files.h"
#include "checkpoint/streamed_archive.h"
#include "lockstep/base/error.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::checkpoint {

namespace fs = std::filesystem;

namespace {

constexpr const char* kLock = "save.lock";
constexpr std::chrono::seconds kForLock(10);  // nobody else has a folder that was just made

using Names = std::set<std::string>;

// A folder, and no symbolic link to one.
FileDescriptor open_folder(int parent, const std::string& name) {
  return FileDescriptor(::openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

FileDescriptor open_file(int folder, const std::string& name, int flags) {
  return FileDescriptor(::openat(folder, name.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
}

std::vector<std::string> names_in(int folder) {
  std::vector<std::string> names;
  const int copy = ::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> listed(copy < 0 ? nullptr : ::fdopendir(copy), &::closedir);
  if (listed == nullptr) return names;
  while (const auto* const entry = ::readdir(listed.get())) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  return names;
}

// Locks the folder of a save, so that no process begins to write there. False where a living process writes there, or
// may. `had_lock`: the lock's file was there before. A full disk has no place for that file.
bool lock_save(int folder, const fs::path& path, bool had_lock, FileDescriptor& lock) {
  constexpr mode_t kMode = 0644;
  lock = FileDescriptor(::openat(folder, kLock, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, kMode));
  if (!lock.open()) return !had_lock && (errno == ENOSPC || errno == EDQUOT);
  bool supported = true;
  return try_lock(lock.get(), (path / kLock).string(), supported) && (supported || !had_lock);
}

bool is_own_file(int folder, const std::string& name) {
  struct stat info {};
  const auto file = open_file(folder, name, O_RDONLY);
  if (!file.open() || ::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) return false;
  const auto temporary = name.rfind(kTemporary);
  if (temporary != std::string::npos) return has_random_form(name.substr(temporary + std::strlen(kTemporary)));
  return name == kLock ? is_own_lock(file.get()) : name.ends_with(".safetensors") && is_own_archive(file.get());
}

bool remove_saves(int rows, const fs::path& path, const Names& kept, const Names& listed);

// Removes the files that a save wrote, and then the folder, if nothing else is in it. False where it stays.
bool remove_save(int rows, const fs::path& rows_path, const std::string& name) {
  const auto folder = open_folder(rows, name);
  if (!folder.open()) return false;
  const auto files = names_in(folder.get());
  const bool had_lock = std::find(files.begin(), files.end(), kLock) != files.end();
  FileDescriptor lock;
  if (!lock_save(folder.get(), rows_path / name, had_lock, lock)) return false;
  const bool is_own_lock = is_own_file(folder.get(), kLock);
  bool is_ours = name.size() == kRandomDigits || (had_lock && is_own_lock);
  for (const auto& file : files) {
    if (file == kLock) continue;  // the last
    if (const auto nested = open_folder(folder.get(), file); nested.open()) {
      if (!file.ends_with(".rows") || !remove_saves(nested.get(), rows_path / name / file, {}, {})) continue;
      ::unlinkat(folder.get(), file.c_str(), AT_REMOVEDIR);
      is_ours = true;
    } else if (is_own_file(folder.get(), file)) {
      is_ours = ::unlinkat(folder.get(), file.c_str(), 0) == 0 || is_ours;
    }
  }
  if (is_own_lock) ::unlinkat(folder.get(), kLock, 0);
  if (!is_ours) return false;
  if (::unlinkat(rows, name.c_str(), AT_REMOVEDIR) == 0 || errno == ENOENT) return true;
  const auto why = errno == ENOTEMPTY ? "it has files that Lockstep did not write" : std::strerror(errno);
  log_warning(text("the folder ", (rows_path / name).string(), " is not removed: ", why));
  return false;
}

// Removes the folders in PATH.rows that are `listed` in the main file or have names that saves give, but for those in
// `kept`. Returns true where one was removed.
bool remove_saves(int rows, const fs::path& path, const Names& kept, const Names& listed) {
  bool any = false;
  for (const auto& name : names_in(rows)) {
    const bool is_save = listed.contains(name) || has_random_form(name);
    if (is_save && !kept.contains(name)) any = remove_save(rows, path, name) || any;
  }
  return any;
}

void remove_saves_but(const std::string& path, const Names& kept, const Names& listed) {
  const auto folder = rows_folder(path);
  const auto rows = open_folder(AT_FDCWD, folder.string());
  if (rows.open() && remove_saves(rows.get(), folder, kept, listed)) ::rmdir(folder.c_str());  // where it is empty
}

// The folders in PATH.rows that the main file lists; nothing where it cannot be read.
std::optional<Names> listed_folders(const std::string& path) {
  if (!is_own_archive(fs::path(checkpoint_file(path)))) return std::nullopt;
  try {
    Names names;
    for (const auto& place : listed_places(read_header(path).entries)) names.insert(place.substr(0, place.find('/')));
    return names;
  } catch (const Error&) {
    return std::nullopt;
  }
}

// Removes the folders of saves to `path` that were killed before they wrote the main file.
void remove_left_over_saves(const std::string& path) {
  const auto listed = listed_folders(path);
  if (listed || !is_taken(checkpoint_file(path))) remove_saves_but(path, listed.value_or(Names()), {});
}

void require_own_place(const fs::path& folder) {
  struct stat info {};
  if (::lstat(folder.c_str(), &info) != 0 || S_ISDIR(info.st_mode)) return;
  throw IoError(
      text("cannot write into ", folder.string(), ": it is ", S_ISLNK(info.st_mode) ? "a symbolic link" : "no folder",
           "; the rows of a checkpoint need a folder there, so move it, or give the checkpoint another path"));
}

}  // namespace

std::vector<std::vector<double>> uncounted_steps(const Archive& main) {
  std::vector<std::vector<double>> steps;
  const auto next = [&] { return text(kUncountedSteps, steps.size()); };
  while (main.entries.contains(next())) steps.push_back(main.numbers(next()));
  return steps;
}

std::vector<std::string> listed_places(const std::map<std::string, std::string>& entries) {
  std::vector<std::string> places;
  for (const auto& [key, value] : entries) {
    if (key.starts_with(kListedRows)) places.push_back(key.substr(std::strlen(kListedRows)));
    if (key.ends_with(kListedFiles) || key == kTablesFolder) places.push_back(value);
  }
  std::erase_if(places, [](const auto& place) { return path_inside("rows", place).empty(); });
  return places;
}

fs::path rows_folder(const std::string& path) { return fs::path(checkpoint_file(path)).replace_extension(".rows"); }

RowsFolder::RowsFolder(const std::string& path) : path_(path), name_(random_digits()) {
  require_own_place(rows_folder(path_));
  remove_left_over_saves(path_);
  lock_ = std::make_unique<FolderLock>(folder().string(), kLock, Deadline::after(kForLock));
}

RowsFolder::~RowsFolder() {
  lock_.reset();
  if (kept_) return;
  const auto folder = rows_folder(path_);
  const auto rows = open_folder(AT_FDCWD, folder.string());
  if (rows.open() && remove_save(rows.get(), folder, name_)) ::rmdir(folder.c_str());
}

void RowsFolder::keep() {
  kept_ = true;
  // The main file lists another writer's folder where that writer was the last to write it.
  auto kept = listed_folders(path_).value_or(Names());
  kept.insert(name_);
  remove_saves_but(path_, kept, {});
}

void remove_rows(const std::string& path) { remove_saves_but(path, listed_folders(path).value_or(Names()), {}); }

void remove_checkpoint(const std::string& path) {
  const auto listed = listed_folders(path);
  remove_own_archive(checkpoint_file(path));
  remove_saves_but(path, {}, listed.value_or(Names()));
}

void remove_checkpoint(const std::string& path, std::error_code& failed) {
  failed.clear();
  try {
    remove_checkpoint(path);
  } catch (const IoError&) {
    failed = std::make_error_code(std::errc::io_error);
  }
}

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
