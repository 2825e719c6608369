#include "checkpoint/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

[[noreturn]] void throw_errno(const std::string& what, const std::string& path) {
  throw IoError(text("cannot ", what, " ", path, ": ", std::strerror(errno)));
}

class File {
 public:
  File(const std::string& path, int flags) : path_(path), descriptor_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {
    if (descriptor_ < 0) throw_errno("open", path);
  }
  ~File() { ::close(descriptor_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const auto written = ::write(descriptor_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) throw_errno("write", path_);
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
  }
  std::size_t read(std::span<std::byte> bytes) {
    for (;;) {
      const auto got = ::read(descriptor_, bytes.data(), bytes.size());
      if (got >= 0) return static_cast<std::size_t>(got);
      if (errno != EINTR) throw_errno("read", path_);
    }
  }
  std::size_t size() const {
    struct stat info {};
    if (::fstat(descriptor_, &info) != 0) throw_errno("read", path_);
    return static_cast<std::size_t>(info.st_size);
  }
  void flush() {
    if (::fsync(descriptor_) != 0) throw_errno("flush", path_);
  }

 private:
  std::string path_;
  int descriptor_;
};

// Removes what a writer that was killed left beside `path`: files "NAME.tmp.PID" of processes that are no more.
void remove_stale(const std::filesystem::path& path) {
  const auto prefix = path.filename().string() + ".tmp.";
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(path.parent_path(), ignored)) {
    const auto name = entry.path().filename().string();
    if (!name.starts_with(prefix)) continue;
    const int process = std::atoi(name.c_str() + prefix.size());
    if (process > 0 && ::kill(process, 0) != 0 && errno == ESRCH) std::filesystem::remove(entry.path(), ignored);
  }
}

}  // namespace

void write_file_atomically(const std::string& path, std::span<const std::span<const std::byte>> parts) {
  const auto folder = std::filesystem::absolute(path).parent_path();
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed) throw IoError(text("cannot make the folder ", folder.string(), ": ", failed.message()));

  const std::string beside = text(path, ".tmp.", ::getpid());
  try {
    File file(beside, O_WRONLY | O_CREAT | O_TRUNC);
    for (const auto& part : parts) file.write(part);
    file.flush();
    if (::rename(beside.c_str(), path.c_str()) != 0) throw_errno("rename a file to", path);
  } catch (...) {
    ::unlink(beside.c_str());
    throw;
  }
  File(folder.string(), O_RDONLY | O_DIRECTORY).flush();
  remove_stale(std::filesystem::absolute(path));
}

std::vector<std::byte> read_file(const std::string& path) {
  File file(path, O_RDONLY);
  std::vector<std::byte> bytes(file.size());
  std::size_t at = 0;
  while (at < bytes.size()) {
    const std::size_t got = file.read(std::span(bytes).subspan(at));
    if (got == 0) break;
    at += got;
  }
  bytes.resize(at);
  return bytes;
}

}  // namespace lockstep
