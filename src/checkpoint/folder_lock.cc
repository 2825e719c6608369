#include "checkpoint/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <string_view>
#include <thread>

#include "base/log.h"
#include "base/mutex.h"
#include "base/process.h"
#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/sharded_archive.h"
#include "lockstep/base/error.h"

namespace lockstep {

namespace {

constexpr std::chrono::milliseconds kBetweenTries(5);
constexpr std::string_view kHolder = "process ";

std::string this_process() { return text(kHolder, ::getpid(), " on ", name_of_this_host()); }

std::string words_in(int descriptor) {
  std::array<char, 300> words{};
  const auto count = ::pread(descriptor, words.data(), words.size() - 1, 0);
  return count > 0 ? words.data() : "";
}

// Tells whether the words are a line such as this_process() gives.
bool name_a_process(std::string_view words) {
  if (!words.starts_with(kHolder)) return false;
  words.remove_prefix(kHolder.size());
  const auto digits = words.find_first_not_of("0123456789");
  return digits != 0 && digits != words.npos && words.substr(digits).starts_with(" on ") &&
         words.find_first_of("\r\n") == words.npos;
}

// Throws IoError, naming the file, for a symbolic link and for what is no regular file. The result is not open where
// the folder is gone.
FileDescriptor open_lock(const std::string& file) {
  FileDescriptor opened(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644));
  struct stat info {};
  const bool is_link = !opened.open() && errno == ELOOP;
  if (is_link || (opened.open() && ::fstat(opened.get(), &info) == 0 && !S_ISREG(info.st_mode))) {
    throw IoError(text("cannot lock ", file, ": it is ", is_link ? "a symbolic link" : "no regular file",
                       ", which Lockstep did not make; remove it, or name another folder"));
  }
  if (!opened.open() && errno != ENOENT) throw IoError(text("cannot open ", file, ": ", std::strerror(errno)));
  return opened;
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
  return ::fstat(descriptor, &locked) == 0 && ::lstat(path.c_str(), &there) == 0 && locked.st_ino == there.st_ino &&
         locked.st_dev == there.st_dev;
}

// A file that somebody else has put there, or that another name leads to too, is none.
bool checkpoint::is_own_lock(int descriptor) {
  struct stat info {};
  const auto words = words_in(descriptor);
  return ::fstat(descriptor, &info) == 0 && info.st_nlink == 1 && (words.empty() || name_a_process(words));
}

FolderLock::FolderLock(const std::string& folder, const std::string& name, Deadline deadline)
    : file_((std::filesystem::path(folder) / name).string()) {
  for (;;) {
    checkpoint::make_folders(folder);  // again where another job has removed it while it was empty
    descriptor_ = open_lock(file_);
    bool supported = true;
    if (descriptor_.open() && checkpoint::try_lock(descriptor_.get(), file_, supported)) {
      if (!supported) {
        static RepeatedWarning warning;
        warning.log(text("the file system of ", folder,
                         " has no locks, so nobody would notice another job that saves into the same folder"));
      }
      break;
    }
    if (deadline.passed()) {
      const auto holder = checkpoint::is_own_lock(descriptor_.get()) ? words_in(descriptor_.get()) : "";
      throw IoError(text("the folder ", folder, " is in use by ", holder.empty() ? "another process" : holder,
                         " (it holds ", file_, "): give each job a folder of its own, or end that process"));
    }
    std::this_thread::sleep_for(kBetweenTries);
  }
  is_own_ = checkpoint::is_own_lock(descriptor_.get());
  if (!is_own_) return;
  const auto words = this_process();
  const bool written =
      ::pwrite(descriptor_.get(), words.data(), words.size(), 0) == static_cast<ssize_t>(words.size()) &&
      ::ftruncate(descriptor_.get(), static_cast<off_t>(words.size())) == 0;
  if (!written) log_warning(text("cannot write to ", file_, ": ", std::strerror(errno)));
}

FolderLock::~FolderLock() {
  if (is_own_) ::unlink(file_.c_str());
}

}  // namespace lockstep

namespace lockstep::checkpoint {

namespace {

class Files {
 public:
  // Never destroyed: it is used while the process ends.
  static Files& of_process() {
    static auto& files = *new Files;
    return files;
  }

  void add(const std::string& file, std::shared_ptr<FolderLock> folder) {
    MutexLock lock(mutex_);
    if (!registered_) ::on_exit(&at_exit, this);
    registered_ = true;
    files_[file] = std::move(folder);
  }
  bool take(const std::string& file) {
    MutexLock lock(mutex_);
    return files_.erase(file) > 0;
  }

 private:
  static void at_exit(int status, void* files) {
    if (status == 0) static_cast<Files*>(files)->remove_all();
  }

  void remove_all() {
    MutexLock lock(mutex_);
    if (::getpid() != process_) return;  // a child that was forked
    for (const auto& [file, lock_of_folder] : files_) {
      std::error_code ignored;
      remove_checkpoint(file, ignored);
    }
    files_.clear();
  }

  const pid_t process_ = ::getpid();
  Mutex mutex_;
  bool registered_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::map<std::string, std::shared_ptr<FolderLock>> files_ LOCKSTEP_GUARDED_BY(mutex_);
};

// The absolute, normalized name, which a change of the working directory does not affect.
std::string name_of(const std::string& file) { return absolute_path(file).lexically_normal().string(); }

}  // namespace

void remove_at_success(const std::string& file, std::shared_ptr<FolderLock> lock) {
  Files::of_process().add(name_of(file), std::move(lock));
}
bool keep_at_success(const std::string& file) { return Files::of_process().take(name_of(file)); }

}  // namespace lockstep::checkpoint
