// Files that are deleted when the program ends with success. Any thread.
#pragma once

#include <memory>
#include <string>

#include "checkpoint/folder_lock.h"

namespace lockstep::checkpoint {

// Removes `file` when this process ends by exit or a return from main with status 0; not where it fails or is killed.
// Until then it holds `lock`, so that no other job writes the file meanwhile.
void remove_at_success(const std::string& file, std::shared_ptr<FolderLock> lock);

// Cancels remove_at_success for `file` and releases the lock; false where there was none.
bool keep_at_success(const std::string& file);

}  // namespace lockstep::checkpoint
