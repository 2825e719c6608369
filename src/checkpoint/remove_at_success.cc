#include "checkpoint/remove_at_success.h"

#include <unistd.h>

#include <cstdlib>
#include <set>

#include "base/mutex.h"

namespace lockstep {
namespace {

class Files {
 public:
  // Never destroyed: it is used while the process ends.
  static Files& of_process() {
    static auto& files = *new Files;
    return files;
  }

  void add(const std::string& file) {
    MutexLock lock(mutex_);
    if (!registered_) ::on_exit(&at_exit, this);
    registered_ = true;
    files_.insert(file);
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
    for (const auto& file : files_) ::unlink(file.c_str());
  }

  const pid_t process_ = ::getpid();
  Mutex mutex_;
  bool registered_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::set<std::string> files_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace

void remove_at_success(const std::string& file) { Files::of_process().add(file); }
bool keep_at_success(const std::string& file) { return Files::of_process().take(file); }

}  // namespace lockstep
