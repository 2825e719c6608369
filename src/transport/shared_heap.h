// Memory that each rank of a host allocates and all of them can access, and how parts of it are given out. The memory
// grows as it is used: neither addresses nor bytes of a file are reserved before.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "transport/shared_space.h"

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

// One rank's own heap, and its view of the others'. Each is a file that grows by segments:
//
//   file of rank r   | segment 0 | segment 1 | ...
//
// The rank's control block says where its segments end; the others read it before a call. A buffer in a segment that
// another rank has not mapped yet, or cannot map, is private. take, give_back: any thread; everything else: the thread
// that makes calls.
class SharedHeap {
 public:
  // `files[r]`: rank r's. `most`: bytes that this rank gives out; 0: no bound.
  SharedHeap(std::shared_ptr<SharedSpace> space, int rank, std::vector<FileDescriptor> files, std::size_t most);
  ~SharedHeap();
  SharedHeap(const SharedHeap&) = delete;
  SharedHeap& operator=(const SharedHeap&) = delete;

  // Zeroed. Null, with a warning, where the system gives no more: of addresses, or of bytes in a file. Throws
  // InvalidArgument over `most`.
  std::byte* take(std::size_t bytes);
  void give_back(std::byte* memory);

  // offset_of: where all others find these bytes, or -1. at: where this rank finds another rank's bytes; throws
  // ClusterError outside of what that rank allocated.
  std::int64_t offset_of(const void* data, std::size_t bytes);
  std::byte* at(int rank, std::int64_t place, std::size_t bytes) const;

  // Maps what the others have added.
  void map_new();

 private:
  struct Segment {
    std::byte* begin;
    std::size_t bytes;
    std::size_t at;              // in the file
    std::shared_ptr<Heap> heap;  // of a segment of this rank's own
  };

  bool grow(std::size_t bytes) LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));
  bool map(int rank, std::size_t begin, std::size_t end, Segment& segment) const;
  static void unmap(int rank, const Segment& segment);
  bool seen_by_all(std::size_t segments) const;
  std::span<const Segment> own() const { return {own_.data(), own_count_.load(std::memory_order_acquire)}; }

  const std::shared_ptr<SharedSpace> space_;
  const int rank_;
  const std::vector<FileDescriptor> files_;
  const std::size_t most_;

  // Segments are added under the mutex, and never change or move: reading those below the count takes no lock.
  Mutex mutex_;
  std::array<Segment, ControlBlock::kMostSegments> own_;
  std::atomic<std::size_t> own_count_ = 0;
  bool refused_ LOCKSTEP_GUARDED_BY(mutex_) = false;  // the warning was logged

  // Only the thread that makes calls uses these.
  std::vector<std::vector<Segment>> others_;  // [rank]
  std::vector<bool> unmappable_;              // [rank]
  std::size_t public_ = 0;                    // so many of its own segments all have mapped
};

}  // namespace lockstep::transport
