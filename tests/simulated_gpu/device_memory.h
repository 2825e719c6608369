// The memory of simulated GPUs. It appears twice: at its address on the device, where access ends the program, and at
// another address for kernels.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

namespace simulated_gpu {

// Any thread may call.
class DeviceMemory {
 public:
  static DeviceMemory& get();

  // Returns null where no memory is left.
  void* allocate(std::size_t bytes, int device);

  // Returns false where nothing was allocated at the address.
  bool give_back(void* address);

  // Returns true for addresses on a device, allocated or not.
  bool contains(const void* address) const;

  // Requires an address on a device.
  void* for_kernels(const void* address) const;

  // Returns the device whose allocation has all these bytes; -1 where there is none.
  int device_of(const void* address, std::size_t bytes);

 private:
  struct Block {
    std::size_t bytes;  // that were asked for
    std::size_t size;   // that are taken
    int device;
  };

  DeviceMemory();

  char *on_device_ = nullptr, *for_kernels_ = nullptr;  // constant after construction

  std::mutex mutex_;  // protects the following
  std::size_t used_ = 0;
  std::map<std::size_t, std::vector<char*>> free_;  // by size
  std::map<const char*, Block> blocks_;             // by address
};

}  // namespace simulated_gpu
