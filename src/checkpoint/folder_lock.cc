#include "checkpoint/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <thread>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/files.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kBetweenTries(5);

std::string this_process() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return text("process ", ::getpid(), " on ", host.data());
}

std::string holder_in(int descriptor) {
  std::array<char, 300> words{};
  const auto count = ::pread(descriptor, words.data(), words.size() - 1, 0);
  return count > 0 ? words.data() : "another process";
}

}  // namespace

bool checkpoint::try_lock(int descriptor, const std::string& path, bool& supported) {
  while (::flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return false;
    if (errno == EINTR) continue;
    supported = false;
    return true;
  }
  // A holder removes the file before it releases the lock, so a lock on a removed file is nobody's.
  struct stat locked {
  }, there{};
  return ::fstat(descriptor, &locked) == 0 && ::stat(path.c_str(), &there) == 0 && locked.st_ino == there.st_ino &&
         locked.st_dev == there.st_dev;
}

FolderLock::FolderLock(const std::string& folder, const std::string& name, Deadline deadline)
    : file_((std::filesystem::path(folder) / name).string()) {
  checkpoint::make_folders(folder);
  for (;;) {
    descriptor_ = FileDescriptor(::open(file_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
    if (!descriptor_.open()) throw IoError(text("cannot open ", file_, ": ", std::strerror(errno)));
    bool supported = true;
    if (checkpoint::try_lock(descriptor_.get(), file_, supported)) {
      if (!supported) {
        static RepeatedWarning warning;
        warning.log(text("the file system of ", folder,
                         " has no locks, so nobody would notice another job that saves into the same folder"));
      }
      break;
    }
    if (deadline.passed()) {
      throw IoError(text("the folder ", folder, " is in use by ", holder_in(descriptor_.get()), " (it holds ", file_,
                         "): give each job a folder of its own, or end that process"));
    }
    std::this_thread::sleep_for(kBetweenTries);
  }
  const auto words = this_process();
  const bool written = ::ftruncate(descriptor_.get(), 0) == 0 &&
                       ::pwrite(descriptor_.get(), words.data(), words.size(), 0) == static_cast<ssize_t>(words.size());
  if (!written) log_warning(text("cannot write to ", file_, ": ", std::strerror(errno)));
}

FolderLock::~FolderLock() { ::unlink(file_.c_str()); }

}  // namespace lockstep
