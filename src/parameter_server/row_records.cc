#include "parameter_server/row_records.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

// On the boundary of a huge page, and in huge pages where the system has them: rows are read in no order. (malloc would
// keep the pages before the boundary.)
Memory chunk_of(std::size_t bytes) {
  const auto whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* const mapped = ::mmap(nullptr, whole + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* const first = static_cast<std::byte*>(mapped);
  const auto before = (kHugePage - reinterpret_cast<std::uintptr_t>(first) % kHugePage) % kHugePage;
  auto* const memory = first + before;
  if (before > 0) ::munmap(first, before);
  if (before < kHugePage) ::munmap(memory + whole, kHugePage - before);
  ::madvise(memory, whole, MADV_HUGEPAGE);  // advice: it may fail
  return {memory, [whole](std::byte* data) { ::munmap(data, whole); }};
}

}  // namespace

RowRecords::RowRecords(std::size_t row_bytes, std::size_t states)
    : record_bytes_((sizeof(std::int64_t) + row_bytes * (1 + states) + 7) / 8 * 8),
      per_chunk_(std::max<std::size_t>(1, kHugePage / record_bytes_)) {}

RowRecords::Record RowRecords::find(std::int64_t id) const {
  const auto* const slot = map_.find(id);
  return slot == nullptr ? Record() : at(*slot);
}

void RowRecords::find(std::span<const std::int64_t> ids, std::vector<Record>& records) const {
  for (const auto id : ids) map_.prefetch(id);
  records.clear();
  for (const auto id : ids) {
    const auto record = find(id);
    if (record) {
      for (std::size_t byte = 0; byte < record_bytes_; byte += 64) __builtin_prefetch(record.begin() + byte);
    }
    records.push_back(record);
  }
}

RowRecords::Record RowRecords::make(std::int64_t id) {
  std::uint32_t slot = 0;
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
    ids_[slot] = id;
  } else {
    if (ids_.size() == std::numeric_limits<std::uint32_t>::max()) {
      throw Error(text("a server has ", ids_.size(), " rows of a table, which is the most; use more servers"));
    }
    slot = static_cast<std::uint32_t>(ids_.size());
    if (slot / per_chunk_ == chunks_.size()) chunks_.push_back(chunk_of(per_chunk_ * record_bytes_));
    ids_.push_back(id);
  }
  map_.insert(id, slot);
  return at(slot);
}

void RowRecords::erase(std::int64_t id) {
  const auto* const found = map_.find(id);
  if (found == nullptr) return;
  const auto slot = *found;
  map_.erase(id);
  ids_[slot] = -1;
  free_.push_back(slot);
}

}  // namespace lockstep::parameter_server
