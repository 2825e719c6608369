#include "device_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace simulated_gpu {
namespace {

constexpr std::size_t kBytes = 8UL << 30;  // the system gives as much as is used
constexpr std::size_t kSmallestBlock = 512;

}  // namespace

DeviceMemory& DeviceMemory::get() {
  static auto* const memory = new DeviceMemory;  // streams and tensors may outlive all else
  return *memory;
}

DeviceMemory::DeviceMemory() {
  const int file = ::memfd_create("simulated GPU", MFD_CLOEXEC);
  if (file < 0 || ::ftruncate(file, kBytes) != 0) throw std::runtime_error("no memory for a simulated GPU");
  const auto map = [&](int access) {
    auto* const address = ::mmap(nullptr, kBytes, access, MAP_SHARED, file, 0);
    if (address == MAP_FAILED) throw std::runtime_error("no memory for a simulated GPU");
    return static_cast<char*>(address);
  };
  on_device_ = map(PROT_NONE);
  for_kernels_ = map(PROT_READ | PROT_WRITE);
  ::close(file);
}

void* DeviceMemory::allocate(std::size_t bytes, int device) {
  if (bytes > kBytes) return nullptr;
  const auto size = std::max(kSmallestBlock, std::bit_ceil(bytes));
  const std::lock_guard lock(mutex_);
  auto& free = free_[size];
  char* address = nullptr;
  if (!free.empty()) {
    address = free.back();
    free.pop_back();
  } else if (used_ + size <= kBytes) {
    address = on_device_ + std::exchange(used_, used_ + size);
  } else {
    return nullptr;
  }
  blocks_[address] = {bytes, size, device};
  return address;
}

bool DeviceMemory::give_back(void* address) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(static_cast<char*>(address));
  if (found == blocks_.end()) return false;
  free_[found->second.size].push_back(static_cast<char*>(address));
  blocks_.erase(found);
  return true;
}

bool DeviceMemory::contains(const void* address) const {
  const std::less<const void*> before;
  return !before(address, on_device_) && before(address, on_device_ + kBytes);
}

void* DeviceMemory::for_kernels(const void* address) const {
  return for_kernels_ + (static_cast<const char*>(address) - on_device_);
}

int DeviceMemory::device_of(const void* address, std::size_t bytes) {
  if (!contains(address)) return -1;
  const auto* const begin = static_cast<const char*>(address);
  const std::lock_guard lock(mutex_);
  const auto after = blocks_.upper_bound(begin);
  if (after == blocks_.begin()) return -1;
  const auto& [start, block] = *std::prev(after);
  const auto offset = static_cast<std::size_t>(begin - start);
  return offset <= block.bytes && bytes <= block.bytes - offset ? block.device : -1;
}

}  // namespace simulated_gpu
