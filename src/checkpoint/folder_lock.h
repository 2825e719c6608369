// A lock on a folder that other processes, containers and threads see, and files that are deleted when the program ends
// with success.
#pragma once

#include <memory>
#include <string>

#include "base/file.h"
#include "lockstep/base/deadline.h"

namespace lockstep {

// Held from construction to destruction, and released by the system when the process ends. It is an flock(2) on the
// file `name` in `folder`, which is there while the lock is held; NFS carries it between hosts. On a file system that
// has no locks there is a warning and no lock. A file of that name that Lockstep did not write is locked, and left as
// it is.
class FolderLock {
 public:
  // Makes the folder if need be. Waits until `deadline` for another holder to release it; then throws IoError naming
  // the holder. Throws IoError also where a symbolic link or a device has that name.
  FolderLock(const std::string& folder, const std::string& name, Deadline deadline);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  std::string file_;
  FileDescriptor descriptor_;
  bool is_own_ = false;
};

}  // namespace lockstep

namespace lockstep::checkpoint {

// Tries to lock the open file `descriptor` of `path`. True where this process holds the lock and `path` still names
// that file. Where the file system has no locks, sets `supported` to false and returns true.
bool try_lock(int descriptor, const std::string& path, bool& supported);

// True where a FolderLock made the open file: the file is empty, or has the words of a holder.
bool is_own_lock(int descriptor);

// Removes `file` when this process ends by exit or a return from main with status 0; not where it fails or is killed.
// Until then it holds `lock`, so that no other job writes the file meanwhile.
void remove_at_success(const std::string& file, std::shared_ptr<FolderLock> lock);

// Cancels remove_at_success for `file` and releases the lock; false where there was none.
bool keep_at_success(const std::string& file);

}  // namespace lockstep::checkpoint
