// Gives out parts of a region of shared memory.
#pragma once

#include <cstddef>
#include <map>

#include "base/mutex.h"

namespace lockstep::transport {

constexpr std::size_t kPage = 4096;

// `bytes` rounded up to whole pages.
constexpr std::size_t pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Whole pages, first fit. Any thread.
class Heap {
 public:
  Heap(std::byte* begin, std::size_t bytes);

  // Zeroed; null where there is no room.
  std::byte* take(std::size_t bytes);

  // Gives the memory back to the system.
  void give_back(std::byte* memory);

  bool contains(const void* data, std::size_t bytes) const;
  std::byte* begin() const { return begin_; }

 private:
  std::byte* const begin_;
  const std::size_t bytes_;
  Mutex mutex_;
  std::map<std::byte*, std::size_t> free_ LOCKSTEP_GUARDED_BY(mutex_);
  std::map<std::byte*, std::size_t> taken_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::transport
