// Files: descriptors that are closed with their owners, and regular files, opened for reading. Any thread.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <string>
#include <utility>

namespace lockstep {

// A file descriptor that is closed with its owner.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }

  int get() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }  // whoever called it closes it

 private:
  int fd_ = -1;
};

// Files that a user names, opened for reading. Any thread.

// Opens a file, or what a symbolic link leads to. Throws IoError, naming the file and the reason, where it cannot be
// opened or is no regular file. A FIFO or a device may never end. Never waits.
FileDescriptor open_regular_file(const std::string& path);

// Returns the contents of a regular file of at most `most` bytes. Throws IoError as open_regular_file does.
std::string read_small_file(const std::string& path, std::size_t most = std::size_t{1} << 20);

}  // namespace lockstep
