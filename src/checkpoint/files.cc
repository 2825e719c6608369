#include "checkpoint/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

#include "base/file_descriptor.h"
#include "base/text.h"
#include "checkpoint/atomic_file.h"
#include "lockstep/base/error.h"

namespace lockstep::checkpoint {
namespace fs = std::filesystem;

namespace {

constexpr std::size_t kCopied = std::size_t{1} << 20;  // bytes that are copied at a time

void require(const std::error_code& failed, const char* what, const fs::path& path) {
  if (failed) throw IoError(text("cannot ", what, " ", path.string(), ": ", failed.message()));
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
  std::error_code failed;
  fs::create_directories(folder, failed);
  require(failed, "make the folder", folder);
  for (const auto& made : missing) flush_folder(made.parent_path());
}

void flush_folder(const fs::path& folder) {
  const FileDescriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const bool flushed = opened.open() && ::fsync(opened.get()) == 0;
  if (flushed || (opened.open() && (errno == EINVAL || errno == ENOTSUP))) return;
  throw IoError(text("cannot flush the folder ", folder.string(), ": ", std::strerror(errno)));
}

fs::path path_inside(const fs::path& folder, const std::string& name) {
  const fs::path place(name);
  if (place.empty() || place.is_absolute() || name.find('\0') != std::string::npos) return {};
  for (const auto& part : place) {
    if (part.empty() || part == "." || part == "..") return {};
  }
  return folder / place;
}

}  // namespace lockstep::checkpoint
