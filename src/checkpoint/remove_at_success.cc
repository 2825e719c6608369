#include "checkpoint/remove_at_success.h"

#include <unistd.h>

#include <cstdlib>
#include <map>

#include "base/mutex.h"
#include "checkpoint/files.h"
#include "checkpoint/sharded_archive.h"

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
