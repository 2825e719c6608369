#include "checkpoint/own_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>

#include "base/file.h"
#include "base/log.h"
#include "base/text.h"
#include "checkpoint/folder_lock.h"
#include "checkpoint/safetensors.h"
#include "lockstep/base/error.h"

namespace lockstep::checkpoint {
namespace fs = std::filesystem;

namespace {

constexpr std::chrono::hours kForAnotherWriter(1);
constexpr std::size_t kFewestDigits = 7;  // shorter names are likelier a person's than random

FileDescriptor open_unfollowed(const fs::path& path, int flags) {
  return FileDescriptor(::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
}

// True where the file's name is that of a writer's left-over. `own`: the name of the file that is written now.
bool may_be_left_over(const std::string& name, const std::string& own) {
  const auto at = name.rfind(kTemporary);
  if (at == std::string::npos) return false;
  const auto base = name.substr(0, at), digits = name.substr(at + std::strlen(kTemporary));
  if (!has_random_form(digits)) return false;
  return base == own || (digits.size() == kRandomDigits && base.ends_with(".safetensors"));
}

// Locks may be local to a host, so what another path's writer may still write must be old.
bool is_left_over(int descriptor, const std::string& name, const std::string& own) {
  struct stat info {};
  if (::fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode) || info.st_uid != ::geteuid()) return false;
  if (name.starts_with(own + kTemporary)) return true;
  const auto written = std::chrono::system_clock::from_time_t(info.st_mtime);
  if (std::chrono::system_clock::now() - written < kForAnotherWriter) return false;
  return info.st_size == 0 || is_own_archive(descriptor);
}

}  // namespace

std::string random_digits() {
  std::random_device source;
  const auto digits = text(std::hex, static_cast<std::uint64_t>(source()) << 32 | source());
  return std::string(kRandomDigits - digits.size(), '0') + digits;
}

bool has_random_form(const std::string& name) {
  return name.size() >= kFewestDigits && name.size() <= kRandomDigits &&
         name.find_first_not_of("0123456789abcdef") == std::string::npos;
}

bool is_own_archive(int descriptor) {
  struct stat info {};
  if (::fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode)) return false;
  const auto size = static_cast<std::size_t>(info.st_size);
  std::array<std::byte, kLengthBytes> length{};
  if (::pread(descriptor, length.data(), length.size(), 0) != static_cast<ssize_t>(length.size())) return false;
  try {
    std::string header(header_bytes("", length, size), '\0');
    const auto got = ::pread(descriptor, header.data(), header.size(), kLengthBytes);
    return got == static_cast<ssize_t>(header.size()) && says_own_format(header);
  } catch (const DataError&) {
    return false;
  }
}

bool is_own_archive(const fs::path& path) {
  const auto file = open_unfollowed(path, O_RDONLY);
  return file.open() && is_own_archive(file.get());
}

bool is_taken(const fs::path& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) == 0) return true;
  if (errno == ENOENT || errno == ENOTDIR) return false;
  throw IoError(text("cannot look for ", path.string(), ": ", std::strerror(errno)));
}

void remove_own_archive(const fs::path& path) {
  if (!is_taken(path)) return;
  if (!is_own_archive(path)) {
    return log_warning(text(path.string(), " is not removed: it is no file that Lockstep wrote"));
  }
  if (::unlink(path.c_str()) == 0 || errno == ENOENT) return;
  throw IoError(text("cannot remove ", path.string(), ": ", std::strerror(errno)));
}

void require_own_archive_or_nothing(const fs::path& path) {
  if (!is_taken(path) || is_own_archive(path)) return;
  throw IoError(
      text(path.string(), " is no file that Lockstep wrote, and would be lost: move it, or name another folder"));
}

bool is_damaged_archive(const fs::path& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && info.st_uid == ::geteuid() &&
         !is_own_archive(path);
}

void require_index_or_nothing(const fs::path& file) {
  if (!is_taken(file)) return;
  const auto contents = read_small_file(file.string(), kLongestIndex);
  if (contents.empty() || contents.find("model_checkpoint_path") != std::string::npos) return;
  throw IoError(text("cannot list a checkpoint in ", file.string(), ": that file is no list of checkpoints, and would ",
                     "be lost; move it, or name another folder"));
}

void require_replaceable(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0 || S_ISREG(info.st_mode)) return;
  throw IoError(text("cannot write ", path, ": it is ", S_ISDIR(info.st_mode) ? "a folder" : "no regular file",
                     "; name a file, or a place where there is nothing"));
}

void require_private_folder(const std::string& name, const fs::path& folder) {
  struct stat info {};
  if (::stat(folder.c_str(), &info) != 0) {
    throw InvalidArgument(text(name, ": cannot look into ", folder.string(), ": ", std::strerror(errno)));
  }
  const bool is_own = info.st_uid == ::geteuid() || info.st_uid == 0;
  const bool others_write = (info.st_mode & (S_IWGRP | S_IWOTH)) != 0;
  if (S_ISDIR(info.st_mode) && is_own && !others_write) return;
  throw InvalidArgument(
      text(name, ": ", folder.string(),
           !S_ISDIR(info.st_mode) ? text(" is no folder")
           : !is_own              ? text(" belongs to user ", info.st_uid, ", who may put anything there")
                     : text(" may be written by others (its mode is ", std::oct, info.st_mode & 07777, ")"),
           "; it must be a folder of this user's (", ::geteuid(), ") or root's in which nobody else may write: ",
           is_own ? text("chmod go-w ", folder.string()) : text("name another")));
}

void remove_left_overs(const fs::path& path) {
  const auto own = path.filename().string();
  std::error_code ended;
  for (fs::directory_iterator entry(path.parent_path(), ended), end; !ended && entry != end; entry.increment(ended)) {
    const auto name = entry->path().filename().string();
    if (!may_be_left_over(name, own)) continue;
    const auto left = open_unfollowed(entry->path(), O_RDWR);
    bool supported = true;
    if (left.open() && is_left_over(left.get(), name, own) && try_lock(left.get(), entry->path().string(), supported) &&
        supported) {
      ::unlink(entry->path().c_str());
    }
  }
}

}  // namespace lockstep::checkpoint
