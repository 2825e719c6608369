// Memory of one process that another one of its host reads and writes where it lies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/file.h"

namespace lockstep::parameter_server {

// A memory file, which the other process opens through this one's entry in /proc. So both belong to one user, and
// nothing is left of the file when both have ended. Any thread.
class SharedBlock {
 public:
  // Another process finds the block by this. `nonce`: random bytes after the block, by which the finder knows that it
  // has opened this one, and not that of a process with this number on another host.
  struct Handle {
    std::int64_t process = 0, descriptor = 0;
    std::uint64_t bytes = 0;
    std::string nonce;
  };

  // A new one, zeroed. Throws IoError.
  static std::shared_ptr<SharedBlock> make(std::size_t bytes);

  // Another process's; null where it cannot be reached.
  static std::shared_ptr<SharedBlock> open(const Handle& handle);

  ~SharedBlock();
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;

  Handle handle() const;
  std::byte* begin() const { return begin_; }
  std::size_t bytes() const { return bytes_; }

  // Returns where these bytes begin in the block; -1 where they are outside.
  std::int64_t offset_of(const void* data, std::size_t bytes) const;

  // The bytes at an offset; null where they are not in it.
  std::byte* at(std::int64_t offset, std::size_t bytes) const;

 private:
  SharedBlock(FileDescriptor file, std::size_t bytes, std::byte* begin)
      : file_(std::move(file)), bytes_(bytes), begin_(begin) {}
  static std::shared_ptr<SharedBlock> map(FileDescriptor file, std::size_t bytes);

  const FileDescriptor file_;
  const std::size_t bytes_;
  std::byte* const begin_;
};

}  // namespace lockstep::parameter_server
