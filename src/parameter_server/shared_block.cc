#include "parameter_server/shared_block.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/shared_space.h"

namespace lockstep::parameter_server {
namespace {

constexpr std::size_t kNonce = 32;
constexpr std::size_t kMost = std::size_t{1} << 46;

}  // namespace

std::shared_ptr<SharedBlock> SharedBlock::map(FileDescriptor file, std::size_t bytes) {
  void* const memory = mmap(nullptr, bytes + kNonce, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) return nullptr;
  return std::shared_ptr<SharedBlock>(new SharedBlock(std::move(file), bytes, static_cast<std::byte*>(memory)));
}

std::shared_ptr<SharedBlock> SharedBlock::make(std::size_t bytes) {
  auto file = transport::make_memory_file();
  const auto problem = transport::problem_with_growing(file.get(), bytes + kNonce);
  auto block = problem.empty() ? map(std::move(file), bytes) : nullptr;
  if (block == nullptr) throw IoError(text("no ", bytes, " bytes of shared memory: ", problem));
  randombytes_buf(block->begin_ + bytes, kNonce);
  return block;
}

std::shared_ptr<SharedBlock> SharedBlock::open(const Handle& handle) {
  if (handle.bytes > kMost || handle.nonce.size() != kNonce) return nullptr;
  const auto path = text("/proc/", handle.process, "/fd/", handle.descriptor);
  FileDescriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  // A file that cannot shrink is a memory file, whose bytes stay valid once they are mapped.
  if (!file.open() || !transport::cannot_shrink(file.get()) || fstat(file.get(), &status) != 0 ||
      static_cast<std::uint64_t>(status.st_size) != handle.bytes + kNonce) {
    return nullptr;
  }
  auto block = map(std::move(file), handle.bytes);
  const bool same = block != nullptr && std::memcmp(block->begin_ + handle.bytes, handle.nonce.data(), kNonce) == 0;
  return same ? block : nullptr;
}

SharedBlock::~SharedBlock() { munmap(begin_, bytes_ + kNonce); }

SharedBlock::Handle SharedBlock::handle() const {
  return {.process = getpid(),
          .descriptor = file_.get(),
          .bytes = bytes_,
          .nonce = {reinterpret_cast<const char*>(begin_ + bytes_), kNonce}};
}

std::int64_t SharedBlock::offset_of(const void* data, std::size_t bytes) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(begin_), at = reinterpret_cast<std::uintptr_t>(data);
  const bool inside = at >= begin && at - begin <= bytes_ && bytes <= bytes_ - (at - begin);
  return inside ? static_cast<std::int64_t>(at - begin) : -1;
}

std::byte* SharedBlock::at(std::int64_t offset, std::size_t bytes) const {
  const bool inside =
      offset >= 0 && static_cast<std::uint64_t>(offset) <= bytes_ && bytes <= bytes_ - static_cast<std::size_t>(offset);
  return inside ? begin_ + offset : nullptr;
}

}  // namespace lockstep::parameter_server
