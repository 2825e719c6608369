#include "checkpoint/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <vector>

#include "base/file.h"
#include "base/text.h"
#include "checkpoint/folder_lock.h"
#include "checkpoint/own_files.h"
#include "lockstep/base/error.h"

namespace lockstep::checkpoint {

namespace fs = std::filesystem;

namespace {

constexpr std::size_t kCopied = std::size_t{1} << 20;  // bytes that are copied at a time
constexpr int kTriesToMakeFolders = 100;

void require(const std::error_code& failed, const char* what, const fs::path& path) {
  if (failed) throw IoError(text("cannot ", what, " ", path.string(), ": ", failed.message()));
}

std::error_code try_to_flush(const fs::path& folder) {
  const FileDescriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (opened.open() && (::fsync(opened.get()) == 0 || errno == EINVAL || errno == ENOTSUP)) return {};
  return {errno, std::generic_category()};
}

}  // namespace

bool file_exists(const fs::path& path) {
  std::error_code failed;
  const bool there = fs::exists(path, failed);
  require(failed, "look for", path);
  return there;
}

fs::path absolute_path(const fs::path& path) {
  std::error_code failed;
  auto absolute = fs::absolute(path, failed);
  require(failed, "find the folder of", path);
  return absolute;
}

void link_or_copy(const fs::path& from, const fs::path& to) {
  std::error_code failed;
  fs::create_hard_link(from, to, failed);
  if (!failed) return;
  if (failed == std::errc::file_exists) require(failed, "make", to);
  const ReadableFile whole(from.string());
  AtomicFile copy(to.string());
  std::vector<std::byte> piece;
  for (std::size_t at = 0; at < whole.size(); at += piece.size()) {
    piece.resize(std::min(kCopied, whole.size() - at));
    whole.read(at, piece);
    copy.append(piece);
  }
  copy.commit();
}

void rename_file(const fs::path& from, const fs::path& to) {
  std::error_code failed;
  fs::rename(from, to, failed);
  require(failed, "rename", from);
  fs::remove(from, failed);  // where both were one file, rename has done nothing
}

void make_folders(const fs::path& folder) {
  std::vector<fs::path> missing;
  for (auto at = absolute_path(folder); !file_exists(at) && at != at.root_path(); at = at.parent_path()) {
    missing.push_back(at);
  }
  // Another process may remove a folder that is still empty: then it is made again.
  std::error_code failed = std::make_error_code(std::errc::no_such_file_or_directory);
  for (int tries = 0; failed == std::errc::no_such_file_or_directory && tries < kTriesToMakeFolders; ++tries) {
    fs::create_directories(folder, failed);
    for (const auto& made : missing) {
      if (!failed) failed = try_to_flush(made.parent_path());
    }
  }
  require(failed, "make the folder", folder);
}

void flush_folder(const fs::path& folder) { require(try_to_flush(folder), "flush the folder", folder); }

fs::path path_inside(const fs::path& folder, const std::string& name) {
  const fs::path place(name);
  if (place.empty() || place.is_absolute() || name.find('\0') != std::string::npos) return {};
  for (const auto& part : place) {
    if (part.empty() || part == "." || part == "..") return {};
  }
  return folder / place;
}

namespace {

[[noreturn]] void throw_errno(const std::string& what, const std::string& path) {
  throw IoError(text("cannot ", what, " ", path, ": ", std::strerror(errno)));
}

class File {
 public:
  File(const std::string& path, int flags) : path_(path), descriptor_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {
    if (!descriptor_.open()) throw_errno("open", path);
  }

  int descriptor() const { return descriptor_.get(); }

  void write_at(std::size_t offset, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const auto written = ::pwrite(descriptor(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) throw_errno("write", path_);
      offset += static_cast<std::size_t>(written);
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
  }
  void flush() {
    if (::fsync(descriptor()) != 0) throw_errno("flush", path_);
  }

 private:
  std::string path_;
  FileDescriptor descriptor_;
};

// A new file "PATH.tmp.RANDOM", locked while it is written: so no other writer takes its name or removes it. That holds
// for threads, and for processes of other containers, which may have this process's number.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& path) {
    bool locked = false, supported = true;
    while (!locked) {
      name_ = text(path, kTemporary, random_digits());
      file_.emplace(name_, O_WRONLY | O_CREAT | O_EXCL);
      locked = try_lock(file_->descriptor(), name_, supported);  // false: removed as a left-over before it was locked
    }
  }
  ~TemporaryFile() {
    if (!renamed_) ::unlink(name_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  const std::string& name() const { return name_; }
  File& file() { return *file_; }
  void rename_to(const std::string& path) {
    if (::rename(name_.c_str(), path.c_str()) != 0) throw_errno("rename a file to", path);
    renamed_ = true;
  }

 private:
  std::string name_;
  std::optional<File> file_;
  bool renamed_ = false;
};

}  // namespace

struct AtomicFile::Beside {
  explicit Beside(const std::string& path) : temporary(path) {}
  TemporaryFile temporary;
  std::size_t end = 0;  // of what was appended
};

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  const auto whole_path = absolute_path(path_);
  require_replaceable(path_);
  make_folders(whole_path.parent_path());
  remove_left_overs(whole_path);  // before this file needs their place
  beside_ = std::make_unique<Beside>(path_);
}

AtomicFile::~AtomicFile() = default;

void AtomicFile::append(std::span<const std::byte> bytes) {
  write_at(beside_->end, bytes);
  beside_->end += bytes.size();
}

void AtomicFile::write_at(std::size_t offset, std::span<const std::byte> bytes) {
  beside_->temporary.file().write_at(offset, bytes);
}

const std::string& AtomicFile::temporary() const { return beside_->temporary.name(); }

void AtomicFile::commit() {
  beside_->temporary.file().flush();
  beside_->temporary.rename_to(path_);
  beside_.reset();
  flush_folder(absolute_path(path_).parent_path());
}

void write_file_atomically(const std::string& path, std::span<const std::span<const std::byte>> parts) {
  AtomicFile file(path);
  for (const auto& part : parts) file.append(part);
  file.commit();
}

ReadableFile::ReadableFile(std::string path) : path_(std::move(path)), descriptor_(open_regular_file(path_)) {
  struct stat info {};
  if (::fstat(descriptor_.get(), &info) != 0) throw_errno("read", path_);
  size_ = static_cast<std::size_t>(info.st_size);
}

void ReadableFile::read(std::size_t offset, std::span<std::byte> bytes) const {
  while (!bytes.empty()) {
    const auto got = ::pread(descriptor_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno("read", path_);
    if (got == 0) throw IoError(text("cannot read ", path_, ": it ends at byte ", offset));
    offset += static_cast<std::size_t>(got);
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
}

void require_writable_folder(const std::string& folder) {
  make_folders(folder);
  const auto place = absolute_path(folder) / "writable";
  remove_left_overs(place);
  const TemporaryFile probe(place.string());
}

void write_to_file(const std::string& path, std::size_t offset, std::span<const std::span<const std::byte>> parts) {
  File file(path, O_WRONLY);
  for (const auto& part : parts) {
    file.write_at(offset, part);
    offset += part.size();
  }
  file.flush();
}

std::vector<std::byte> read_file(const std::string& path) {
  const ReadableFile file(path);
  std::vector<std::byte> bytes(file.size());
  file.read(0, bytes);
  return bytes;
}

}  // namespace lockstep::checkpoint
