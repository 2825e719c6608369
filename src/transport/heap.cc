#include "transport/heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

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

}  // namespace lockstep::transport
