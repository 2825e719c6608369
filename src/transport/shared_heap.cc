#include "transport/shared_heap.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::transport {

Heap::Heap(std::byte* begin, std::size_t bytes) : begin_(begin), bytes_(bytes / kPage * kPage) {
  free_[begin_] = bytes_;
}

std::byte* Heap::take(std::size_t bytes) {
  const auto wanted = pages(std::max(bytes, std::size_t{1}));
  MutexLock lock(mutex_);
  const auto hole = std::find_if(free_.begin(), free_.end(), [&](const auto& part) { return part.second >= wanted; });
  if (hole == free_.end()) return nullptr;
  const auto [at, length] = *hole;
  free_.erase(hole);
  if (length > wanted) free_[at + wanted] = length - wanted;
  taken_[at] = wanted;
  return at;
}

void Heap::give_back(std::byte* memory) {
  MutexLock lock(mutex_);
  const auto taken = taken_.extract(memory);
  auto length = taken.mapped();
  madvise(memory, length, MADV_REMOVE);  // and zero when it is touched again
  auto after = free_.lower_bound(memory);
  if (after != free_.end() && after->first == memory + length) {
    length += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == memory) {
      before->second += length;
      return;
    }
  }
  free_[memory] = length;
}

bool Heap::contains(const void* data, std::size_t bytes) const {
  const auto* const first = static_cast<const std::byte*>(data);
  return first >= begin_ && first + bytes <= begin_ + bytes_;
}

namespace {

constexpr std::size_t kSmallestSegment = std::size_t{16} << 20;

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
std::size_t gap_before(int rank) { return kPage * (1 + 37 * index(rank)); }

}  // namespace

SharedHeap::SharedHeap(std::shared_ptr<SharedSpace> space, int rank, std::vector<FileDescriptor> files,
                       std::size_t most)
    : space_(std::move(space)),
      rank_(rank),
      files_(std::move(files)),
      most_(most),
      others_(files_.size()),
      unmappable_(files_.size()) {}

SharedHeap::~SharedHeap() {
  for (const auto& segment : own()) unmap(rank_, segment);
  for (int r = 0; r < static_cast<int>(others_.size()); ++r) {
    for (const auto& segment : others_[index(r)]) unmap(r, segment);
  }
}

std::byte* SharedHeap::take(std::size_t bytes) {
  MutexLock lock(mutex_);
  for (int attempt = 0; attempt < 2; ++attempt) {
    for (const auto& segment : own()) {
      if (auto* const memory = segment.heap->take(bytes)) return memory;
    }
    if (attempt == 0 && !grow(bytes)) return nullptr;
  }
  return nullptr;
}

// Each segment is as large as all before it together, so that there are few.
bool SharedHeap::grow(std::size_t bytes) {
  const auto count = own().size();
  const auto before = count == 0 ? 0 : own().back().at + own().back().bytes;
  const auto needed = pages(std::max<std::size_t>(bytes, 1));
  auto size = std::max({needed, kSmallestSegment, before});
  if (most_ > 0) {
    const auto left = before < most_ ? most_ / kPage * kPage - before : 0;
    if (needed > left || bytes > most_) {
      throw InvalidArgument(text("allocate: ", bytes, " bytes do not fit into what is left of ", most_,
                                 " bytes of shared memory; make the group with a larger heap_bytes"));
    }
    size = left;  // one segment, so that what is freed can be joined; untouched bytes cost nothing
  }
  std::string problem = count == ControlBlock::kMostSegments ? "it was asked for too often" : "";
  Segment segment{};
  for (const auto wanted : {size, needed}) {  // where a limit forbids the full size, only what is needed
    if (count == ControlBlock::kMostSegments) break;
    problem = problem_with_growing(files_[index(rank_)].get(), before + wanted);
    if (problem.empty() && map(rank_, before, before + wanted, segment)) break;
    if (problem.empty()) problem = std::strerror(errno);
  }
  if (segment.begin == nullptr) {
    if (!std::exchange(refused_, true)) {
      log_warning(text("rank ", rank_, " can share no more memory (", problem,
                       "): what it allocates is its own, and is copied through windows"));
    }
    return false;
  }
  segment.heap = std::make_shared<Heap>(segment.begin, segment.bytes);
  auto& control_block = space_->control_block(rank_);
  control_block.segment_ends[count].store(segment.at + segment.bytes, std::memory_order_relaxed);
  own_[count] = std::move(segment);
  own_count_.store(count + 1, std::memory_order_release);
  control_block.segments.store(static_cast<std::uint32_t>(count + 1), std::memory_order_release);
  return true;
}

// Maps a segment after a gap that differs by rank. Buffers of several ranks that lie a power of two apart would compete
// for entries of caches and prefetchers (10% of a reduction of 64 MiB by four).
bool SharedHeap::map(int rank, std::size_t begin, std::size_t end, Segment& segment) const {
  const auto gap = gap_before(rank), bytes = end - begin;
  void* const reserved = mmap(nullptr, gap + bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return false;
  auto* const first = static_cast<std::byte*>(reserved) + gap;
  segment = {first, bytes, begin, nullptr};
  if (mmap(first, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, files_[index(rank)].get(),
           static_cast<off_t>(begin)) == first) {
    return true;
  }
  const int problem = errno;
  unmap(rank, std::exchange(segment, {}));
  errno = problem;
  return false;
}

void SharedHeap::unmap(int rank, const Segment& segment) {
  munmap(segment.begin - gap_before(rank), gap_before(rank) + segment.bytes);
}

void SharedHeap::give_back(std::byte* memory) {
  for (const auto& segment : own()) {
    if (segment.heap->contains(memory, 1)) return segment.heap->give_back(memory);
  }
}

std::int64_t SharedHeap::offset_of(const void* data, std::size_t bytes) {
  const auto segments = own();
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (!segments[i].heap->contains(data, bytes)) continue;
    if (i >= public_ && !seen_by_all(i + 1)) return -1;
    public_ = std::max(public_, i + 1);
    return static_cast<std::int64_t>(segments[i].at) + (static_cast<const std::byte*>(data) - segments[i].begin);
  }
  return -1;
}

bool SharedHeap::seen_by_all(std::size_t segments) const {
  for (int r = 0; r < static_cast<int>(files_.size()); ++r) {
    if (r != rank_ && space_->control_block(r).mapped[rank_].load(std::memory_order_acquire) < segments) return false;
  }
  return true;
}

std::byte* SharedHeap::at(int rank, std::int64_t place, std::size_t bytes) const {
  const auto within = [&](std::span<const Segment> segments) -> std::byte* {
    for (const auto& segment : segments) {
      const auto offset = static_cast<std::size_t>(place) - segment.at;  // wraps where it lies before
      if (place >= 0 && offset < segment.bytes && bytes <= segment.bytes - offset) return segment.begin + offset;
    }
    return nullptr;
  };
  auto* const found = rank == rank_ ? within(own()) : within(others_[index(rank)]);
  if (found != nullptr) return found;
  throw ClusterError(text("rank ", rank, " showed ", bytes, " bytes at ", place, ", where it shares no memory"));
}

void SharedHeap::map_new() {
  for (int r = 0; r < static_cast<int>(files_.size()); ++r) {
    auto& mapped = others_[index(r)];
    const auto& control_block = space_->control_block(r);
    const auto count =
        std::min<std::size_t>(control_block.segments.load(std::memory_order_acquire), ControlBlock::kMostSegments);
    if (r == rank_ || count == mapped.size() || unmappable_[index(r)]) continue;
    while (mapped.size() < count && !unmappable_[index(r)]) {
      const auto begin = mapped.empty() ? 0 : mapped.back().at + mapped.back().bytes;
      const auto end = control_block.segment_ends[mapped.size()].load(std::memory_order_relaxed);
      struct stat status {};
      const bool is_there = fstat(files_[index(r)].get(), &status) == 0 && end > begin && end % kPage == 0 &&
                            end <= static_cast<std::size_t>(status.st_size);
      Segment segment{};
      if (is_there && map(r, begin, end, segment)) {
        mapped.push_back(std::move(segment));
      } else {
        unmappable_[index(r)] = true;
        log_warning(text("rank ", rank_, " cannot map memory of rank ", r, " (",
                         is_there ? std::strerror(errno) : "its file is too short",
                         "): what that one allocates is copied through windows"));
      }
    }
    space_->control_block(rank_).mapped[r].store(static_cast<std::uint8_t>(mapped.size()), std::memory_order_release);
  }
}

}  // namespace lockstep::transport
