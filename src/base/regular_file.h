// Files that a user names, opened for reading. Any thread.
#pragma once

#include <cstddef>
#include <string>

#include "base/file_descriptor.h"

namespace lockstep {

// Opens a file, or what a symbolic link leads to. Throws IoError, naming the file and the reason, where it cannot be
// opened or is no regular file. A FIFO or a device may never end. Never waits.
FileDescriptor open_regular_file(const std::string& path);

// Returns the contents of a regular file of at most `most` bytes. Throws IoError as open_regular_file does.
std::string read_small_file(const std::string& path, std::size_t most = std::size_t{1} << 20);

}  // namespace lockstep
