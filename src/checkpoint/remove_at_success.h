// Files that a program needs no more once it has done all its work. Any thread.
#pragma once

#include <string>

namespace lockstep {

// Removes `file` when this process ends by exit or a return from main with status 0; not where it fails or is killed.
void remove_at_success(const std::string& file);

// Takes that back; false where it was not said of this file.
bool keep_at_success(const std::string& file);

}  // namespace lockstep
