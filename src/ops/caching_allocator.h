// An allocator that caches freed blocks by size, for the thread that allocated them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/mutex.h"
#include "lockstep/ops/memory.h"

namespace lockstep::ops {

// Any thread may call any method. Blocks are aligned to 64 bytes. A block that another thread frees returns to the heap
// of the thread that allocated it, without a lock. The next thread that starts takes over the heap of a thread that
// ended. Threads keep pointers to their heaps, so an allocator must never be destroyed.
class CachingAllocator {
 public:
  // A block freed while `cache_limit` bytes are cached already goes back to the system. The whole cache does where
  // blocks in use and cached ones would together exceed `limit` bytes. Processes that share this host's memory divide
  // both limits equally.
  explicit CachingAllocator(std::size_t cache_limit, std::size_t limit = std::size_t{1} << 62)
      : cache_limit_(static_cast<std::int64_t>(cache_limit)), limit_(limit) {}

  // Throws std::bad_alloc.
  void* allocate(std::size_t bytes);
  static void deallocate(void* data) noexcept;

  // Gives the cached blocks of all threads' heaps back to the system. Addresses of blocks of 128 KiB to 32 MiB stay
  // reserved, for the next blocks of their size.
  void release();

  MemoryStats stats() const;

 private:
  class Arena;
  struct Heap;
  struct Block;
  struct ThreadHeap;

  static std::size_t release_list(Block*& head);
  Heap& heap_of_this_thread();
  Heap* adopt_heap();
  void abandon_heap(Heap* heap);
  Block* take_from_system(Heap& heap, int size_class);
  void make_room(std::size_t bytes);
  std::int64_t cache_limit() const;

  const std::int64_t cache_limit_;
  const std::size_t limit_;
  std::atomic<std::size_t> reserved_{0};
  std::atomic<std::int64_t> cached_{0};  // without what heaps have not added yet
  mutable Mutex mutex_;
  std::vector<Heap*> heaps_ LOCKSTEP_GUARDED_BY(mutex_);
  std::vector<Heap*> abandoned_ LOCKSTEP_GUARDED_BY(mutex_);  // of threads that have ended
};

// Puts one CachingAllocator, never destroyed, under LibTorch's CPU tensors, unless LOCKSTEP_ALLOCATOR says "system" or
// this is a build for the address sanitizer. Called once, when the library is loaded.
bool install_caching_allocator();

}  // namespace lockstep::ops
