#include "ops/caching_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string_view>
#include <utility>

#include "base/process.h"

namespace lockstep::ops {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr int kSteps = 4;      // size classes in each power of two: at most a quarter of a block is unused
constexpr int kClasses = 160;  // up to 2^40 bytes, more than any tensor

constexpr std::size_t kLarge = std::size_t{1}
                               << 17;  // from here on blocks come from an arena, smaller ones from malloc
constexpr std::size_t kArena = std::size_t{1} << 26;     // of addresses; memory only where blocks have been used
constexpr std::size_t kOwnPages = std::size_t{1} << 25;  // from here on a block has a mapping of its own
constexpr std::size_t kHugePage = std::size_t{1} << 21;
constexpr std::int64_t kFlush = std::int64_t{1} << 16;  // bytes after which a heap adds its count to the allocator's

// Classes are 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, ...: four steps of equal width between powers of two.
int class_of(std::size_t bytes) {
  const std::size_t lines = std::max<std::size_t>(1, (bytes + kAlignment - 1) / kAlignment);
  if (lines <= kSteps) return static_cast<int>(lines) - 1;
  const int shift = std::bit_width(lines - 1) - 3;  // so that 4 <= (lines - 1) >> shift < 8
  return kSteps * shift + static_cast<int>((lines - 1) >> shift);
}

std::size_t bytes_in(int size_class) {
  const int shift = std::max(0, size_class / kSteps - 1);
  return (static_cast<std::size_t>(size_class - kSteps * shift + 1) << shift) * kAlignment;
}

}  // namespace

// In front of the bytes that the caller gets. A cache line, so that these stay aligned.
struct alignas(kAlignment) CachingAllocator::Block {
  Heap* home;
  Block* next;
  std::size_t bytes;  // without this header
  int size_class;
  bool in_memory = true;   // of a large block: whether it still has its pages
  std::size_t mapped = 0;  // bytes of the block's own mapping; 0: it has none

  static Block* of(void* data) { return static_cast<Block*>(data) - 1; }
  void* data() { return this + 1; }
  bool large() const { return bytes >= kLarge; }

  // Gives the memory back to the system. Returns true where the block itself stays, without its pages.
  bool give_back() {
    if (mapped > 0) {
      munmap(this, mapped);
      return false;
    }
    if (large()) {
      drop_pages();
      return true;
    }
    std::free(this);
    return false;
  }

 private:
  // Drops the pages that hold nothing but this block's data.
  void drop_pages() {
    constexpr std::uintptr_t kPage = 4096;
    const auto begin = (reinterpret_cast<std::uintptr_t>(data()) + kPage - 1) / kPage * kPage;
    const auto end = (reinterpret_cast<std::uintptr_t>(data()) + bytes) / kPage * kPage;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
    in_memory = false;
  }
};

namespace {

// Maps addresses that begin at a huge page's boundary and asks for huge pages there: a step reads some megabytes, and
// each small page costs an address translation.
std::byte* map_huge(std::size_t bytes, int flags) {
  void* memory = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* const first = static_cast<std::byte*>(memory);
  const auto before = (kHugePage - reinterpret_cast<std::uintptr_t>(memory) % kHugePage) % kHugePage;
  if (before > 0) munmap(first, before);
  munmap(first + before + bytes, kHugePage - before);
  madvise(first + before, bytes, MADV_HUGEPAGE);
  return first + before;
}

}  // namespace

// Memory for one heap's large blocks, side by side. The address range is never unmapped; its pages can be dropped.
class CachingAllocator::Arena {
 public:
  void* take(std::size_t bytes) {
    if (bytes > static_cast<std::size_t>(end_ - next_)) {
      auto* const begin = map_huge(kArena, MAP_NORESERVE);
      if (begin == nullptr) return nullptr;
      next_ = begin;
      end_ = begin + kArena;
    }
    return std::exchange(next_, next_ + bytes);
  }

 private:
  std::byte* next_ = nullptr;
  std::byte* end_ = nullptr;
};

struct CachingAllocator::Heap {
  CachingAllocator* allocator;
  Mutex mutex;  // taken by the owning thread and by `release`: uncontended in a step
  std::array<Block*, kClasses> free LOCKSTEP_GUARDED_BY(mutex){};
  Arena arena LOCKSTEP_GUARDED_BY(mutex);
  std::atomic<std::int64_t> uncounted{0};  // cached bytes not yet in the allocator's; written by the owning thread
  alignas(kAlignment) std::atomic<Block*> returned{nullptr};  // pushed by other threads, taken whole by the owner

  // Adds to the bytes that are cached. The allocator's counter, which all threads share, is touched seldom.
  void count(std::int64_t bytes) {
    const auto sum = uncounted.load(std::memory_order_relaxed) + bytes;
    const bool flush = std::abs(sum) >= kFlush;
    if (flush) allocator->cached_.fetch_add(sum, std::memory_order_relaxed);
    uncounted.store(flush ? 0 : sum, std::memory_order_relaxed);
  }
  void keep(Block* block) LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex)) {
    auto& head = free[static_cast<std::size_t>(block->size_class)];
    block->next = head;
    head = block;
  }
  void take_returned() LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex)) {
    Block* block = returned.exchange(nullptr, std::memory_order_acquire);
    while (block != nullptr) {
      Block* next = block->next;
      keep(block);
      block = next;
    }
  }
};

// Gives the memory of the list's blocks back to the system, and keeps the blocks that stay. Returns the bytes given
// back.
std::size_t CachingAllocator::release_list(Block*& head) {
  std::size_t bytes = 0;
  Block* kept = nullptr;
  for (Block* block = std::exchange(head, nullptr); block != nullptr;) {
    Block* const next = block->next;
    const bool had_memory = block->in_memory;
    if (had_memory) bytes += block->bytes;
    if (!had_memory || block->give_back()) {
      block->next = kept;
      kept = block;
    }
    block = next;
  }
  head = kept;
  return bytes;
}

void CachingAllocator::release() {
  std::vector<Heap*> heaps;
  {
    MutexLock lock(mutex_);
    heaps = heaps_;
  }
  for (auto* heap : heaps) {
    MutexLock lock(heap->mutex);
    heap->take_returned();
    for (auto& head : heap->free) {
      const auto bytes = release_list(head);
      reserved_.fetch_sub(bytes, std::memory_order_relaxed);
      cached_.fetch_sub(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
    }
  }
}

struct CachingAllocator::ThreadHeap {
  Heap* heap = nullptr;
  ~ThreadHeap();
};

namespace {
// A raw pointer: reading it needs no initialization check, and it stays valid while other thread-local objects are
// destroyed.
thread_local void* current_heap = nullptr;
}  // namespace

CachingAllocator::ThreadHeap::~ThreadHeap() {
  if (heap == nullptr) return;
  current_heap = nullptr;
  heap->allocator->abandon_heap(std::exchange(heap, nullptr));
}

CachingAllocator::Heap& CachingAllocator::heap_of_this_thread() {
  auto* heap = static_cast<Heap*>(current_heap);
  if (heap == nullptr || heap->allocator != this) {
    static thread_local ThreadHeap owner;
    if (owner.heap != nullptr) owner.heap->allocator->abandon_heap(owner.heap);
    heap = owner.heap = adopt_heap();
    current_heap = heap;
  }
  return *heap;
}

CachingAllocator::Heap* CachingAllocator::adopt_heap() {
  MutexLock lock(mutex_);
  if (abandoned_.empty()) {
    heaps_.push_back(new Heap{.allocator = this});
    return heaps_.back();
  }
  auto* heap = abandoned_.back();
  abandoned_.pop_back();
  return heap;
}

void CachingAllocator::abandon_heap(Heap* heap) {
  MutexLock lock(mutex_);
  abandoned_.push_back(heap);
}

void* CachingAllocator::allocate(std::size_t bytes) {
  const int size_class = class_of(bytes);
  if (size_class >= kClasses) throw std::bad_alloc();
  auto& heap = heap_of_this_thread();
  Block* block = nullptr;
  {
    MutexLock lock(heap.mutex);
    auto& head = heap.free[static_cast<std::size_t>(size_class)];
    if (head == nullptr && heap.returned.load(std::memory_order_relaxed) != nullptr) heap.take_returned();
    block = head;
    if (block != nullptr) head = block->next;
  }
  if (block != nullptr && block->in_memory) {
    heap.count(-static_cast<std::int64_t>(block->bytes));
    return block->data();
  }
  make_room(bytes_in(size_class));
  if (block == nullptr) block = take_from_system(heap, size_class);
  if (block == nullptr) {
    release();
    block = take_from_system(heap, size_class);
  }
  if (block == nullptr) throw std::bad_alloc();
  block->in_memory = true;
  reserved_.fetch_add(block->bytes, std::memory_order_relaxed);
  return block->data();
}

CachingAllocator::Block* CachingAllocator::take_from_system(Heap& heap, int size_class) {
  const auto bytes = bytes_in(size_class), with_header = sizeof(Block) + bytes;
  void* memory = nullptr;
  std::size_t mapped = 0;
  if (with_header >= kOwnPages) {
    mapped = (with_header + kHugePage - 1) / kHugePage * kHugePage;
    memory = map_huge(mapped, 0);
  } else if (bytes >= kLarge) {
    MutexLock lock(heap.mutex);
    memory = heap.arena.take(with_header);
  } else {
    memory = std::aligned_alloc(kAlignment, with_header);
  }
  return memory == nullptr ? nullptr : new (memory) Block{&heap, nullptr, bytes, size_class, true, mapped};
}

// Releases the cache where that makes room for `bytes` below the limit: cached blocks of other sizes are of no use
// here.
void CachingAllocator::make_room(std::size_t bytes) {
  const auto limit = limit_ / static_cast<std::size_t>(processes_that_share_memory());
  if (reserved_.load(std::memory_order_relaxed) + bytes <= limit) return;
  const auto [reserved, cached] = stats();
  if (cached > 0 && reserved - cached + bytes <= limit) release();  // else it would cost pages and gain nothing
}

std::int64_t CachingAllocator::cache_limit() const {
  const int processes = processes_that_share_memory();
  return processes == 1 ? cache_limit_ : cache_limit_ / processes;
}

void CachingAllocator::deallocate(void* data) noexcept {
  if (data == nullptr) return;
  auto* block = Block::of(data);
  auto& heap = *block->home;
  auto& allocator = *heap.allocator;
  const bool at_home = current_heap == &heap;
  const auto bytes = static_cast<std::int64_t>(block->bytes);
  const auto cached =
      allocator.cached_.load(std::memory_order_relaxed) + heap.uncounted.load(std::memory_order_relaxed);
  if (cached + bytes > allocator.cache_limit()) {
    allocator.reserved_.fetch_sub(block->bytes, std::memory_order_relaxed);
    if (!block->give_back()) return;
  } else if (at_home) {
    heap.count(bytes);
  } else {
    allocator.cached_.fetch_add(bytes, std::memory_order_relaxed);
  }
  if (at_home) {
    MutexLock lock(heap.mutex);
    heap.keep(block);
    return;
  }
  block->next = heap.returned.load(std::memory_order_relaxed);
  while (
      !heap.returned.compare_exchange_weak(block->next, block, std::memory_order_release, std::memory_order_relaxed)) {
  }
}

MemoryStats CachingAllocator::stats() const {
  MutexLock lock(mutex_);
  auto cached = cached_.load(std::memory_order_relaxed);
  for (const auto* heap : heaps_) cached += heap->uncounted.load(std::memory_order_relaxed);
  return {reserved_.load(std::memory_order_relaxed), static_cast<std::size_t>(std::max<std::int64_t>(0, cached))};
}

namespace {

class TorchAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* data = bytes == 0 ? nullptr : blocks_.allocate(bytes);
    return {data, data, &CachingAllocator::deallocate, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &CachingAllocator::deallocate; }
  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }
  MemoryStats stats() const { return blocks_.stats(); }
  void release() { blocks_.release(); }

 private:
  // The cache may hold half of the memory that this process may use; cached blocks and those in use, three quarters.
  CachingAllocator blocks_{usable_memory_bytes() / 2, usable_memory_bytes() / 4 * 3};
};

// Null where LibTorch's own allocator is used.
TorchAllocator* torch_allocator() {
#if defined(__SANITIZE_ADDRESS__)
  return nullptr;
#else
  const char* choice = std::getenv("LOCKSTEP_ALLOCATOR");
  static auto* const allocator =
      choice != nullptr && std::string_view(choice) == "system" ? nullptr : new TorchAllocator();
  return allocator;
#endif
}

}  // namespace

bool install_caching_allocator() {
  if (torch_allocator() == nullptr) return false;
  c10::SetCPUAllocator(torch_allocator(), 1);
  return true;
}

namespace {
[[maybe_unused]] const bool installed_when_loaded = install_caching_allocator();
}  // namespace

}  // namespace lockstep::ops

namespace lockstep {

MemoryStats memory_stats() {
  return ops::torch_allocator() == nullptr ? MemoryStats{} : ops::torch_allocator()->stats();
}

void release_memory() {
  if (ops::torch_allocator() != nullptr) ops::torch_allocator()->release();
  malloc_trim(0);  // small blocks are malloc's
}

}  // namespace lockstep
