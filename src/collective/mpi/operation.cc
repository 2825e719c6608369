#include "collective/mpi/operation.h"

#include <algorithm>
#include <climits>
#include <new>

#include "base/text.h"
#include "collective/backend.h"
#include "lockstep/base/error.h"

namespace lockstep::collective::mpi {
namespace {

constexpr std::size_t kSmall = 4096;  // bytes that are copied faster than their block is found
constexpr std::size_t kLine = 64;

Memory scratch(std::size_t bytes) {
  return {new (std::align_val_t{kLine}) std::byte[bytes],
          [](std::byte* memory) { operator delete[](memory, std::align_val_t{kLine}); }};
}

bool follow_each_other(const std::vector<Slice>& slices) {
  return std::adjacent_find(slices.begin(), slices.end(),
                            [](const auto& a, const auto& b) { return a.end != b.begin; }) == slices.end();
}

}  // namespace

Memory Blocks::allocate(std::size_t bytes) {
  auto block = private_memory(bytes);
  auto* const data = block.get();
  {
    MutexLock lock(table_->mutex);
    table_->blocks[data] = {block, bytes};
  }
  return {data, [table = table_, block](std::byte* freed) mutable {
            {
              MutexLock lock(table->mutex);
              table->blocks.erase(freed);
            }
            block.reset();
          }};
}

Memory Blocks::find(const std::byte* data, std::size_t bytes) const {
  MutexLock lock(table_->mutex);
  auto after = table_->blocks.upper_bound(data);
  if (after == table_->blocks.begin()) return nullptr;
  const auto& [first, block] = *std::prev(after);
  return data + bytes <= first + block.bytes ? block.memory.lock() : nullptr;
}

bool Operation::keeps(const std::byte* data, std::size_t bytes) {
  if (bytes <= kSmall) return false;
  auto block = blocks_.find(data, bytes);
  if (!block) return false;
  kept_.push_back(std::move(block));
  return true;
}

std::byte* Operation::take(std::size_t bytes) {
  bytes = (bytes + kLine - 1) / kLine * kLine;
  if (used_ + bytes > bytes_) {
    if (copies_) kept_.push_back(std::move(copies_));
    bytes_ = std::max(bytes, 2 * bytes_);
    copies_ = scratch(bytes_);
    used_ = 0;
  }
  return copies_.get() + std::exchange(used_, used_ + bytes);
}

const std::byte* Operation::reads(const std::byte* data, std::size_t bytes, bool copy) {
  if (bytes == 0 || (!copy && keeps(data, bytes))) return data;
  auto* const mine = take(bytes);
  copy_bytes(mine, data, bytes);
  return mine;
}

std::byte* Operation::writes(std::byte* data, std::size_t bytes) {
  if (bytes == 0 || keeps(data, bytes)) return data;
  auto* const mine = take(bytes);
  results_.push_back({data, mine, bytes});
  return mine;
}

std::byte* Operation::updates(std::byte* data, std::size_t bytes) {
  auto* const mine = writes(data, bytes);
  copy_bytes(mine, data, bytes);
  return mine;
}

// `visit_copies(mine, theirs, bytes)` is called for each slice that gets a copy.
template <class Visit>
const Parts& Operation::lay(std::byte* data, std::size_t element, const std::vector<Slice>& slices, bool in_place,
                            const Visit& visit_copies) {
  auto& parts = parts_.emplace_back();
  std::size_t elements = 0;
  for (const auto& slice : slices) elements += slice.count();
  const auto first = slices.front().begin;
  parts.data = in_place ? data + first * element : take(elements * element);
  std::size_t at = 0;
  for (const auto& slice : slices) {
    const auto bytes = slice.count() * element;
    parts.counts.push_back(static_cast<int>(slice.count()));
    parts.places.push_back(static_cast<int>(in_place ? slice.begin - first : at));
    if (!in_place && bytes > 0) visit_copies(parts.data + at * element, data + slice.begin * element, bytes);
    at += slice.count();
  }
  return parts;
}

const Parts& Operation::reads(const ConstBuffer& buffer, const std::vector<Slice>& slices, bool packed, bool copy) {
  const bool reached = slices.back().begin - slices.front().begin <= INT_MAX;
  const bool in_place =
      !copy && reached && (!packed || follow_each_other(slices)) && keeps(bytes_of(buffer), buffer.bytes());
  auto* const data = const_cast<std::byte*>(bytes_of(buffer));  // Parts are of both kinds
  return lay(data, size_of(buffer.dtype), slices, in_place,
             [](std::byte* mine, const std::byte* theirs, std::size_t bytes) { copy_bytes(mine, theirs, bytes); });
}

const Parts& Operation::writes(const Buffer& buffer, const std::vector<Slice>& slices) {
  const bool reached = slices.back().begin - slices.front().begin <= INT_MAX;
  const bool in_place = reached && keeps(bytes_of(buffer), buffer.bytes());
  return lay(bytes_of(buffer), size_of(buffer.dtype), slices, in_place,
             [this](std::byte* mine, std::byte* theirs, std::size_t bytes) {
               results_.push_back({theirs, mine, bytes});
             });
}

void Operation::expect(int from, int count, Handle dtype) {
  auto& last = requests_.back();
  last.from = from;
  last.count = count;
  last.dtype = dtype;
}

void Operation::require_length(const Request& request, const Status& status) const {
  int count = 0;
  require(library().MPI_Get_count(&status, request.dtype, &count), "MPI_Get_count");
  if (count == request.count) return;
  throw InvalidArgument(
      text("the ranks' calls differ: rank ", request.from, " sent ", count, " elements to a recv of ", request.count));
}

bool Operation::test() {
  for (; next_ < requests_.size(); ++next_) {
    auto& request = requests_[next_];
    int done = 0;
    Status status;
    require(library().MPI_Test(&request.handle, &done, &status), request.function);
    if (done == 0) return false;
    if (request.from >= 0) require_length(request, status);
  }
  return true;
}

void Operation::finish() {
  for (const auto& copy : results_) copy_bytes(copy.to, copy.from, copy.bytes);
  results_.clear();
  requests_.clear();
  next_ = 0;
  parts_.clear();
  kept_.clear();
  used_ = 0;
}

void leave(std::unique_ptr<Operation> operation) {
  static Mutex mutex;
  static auto* const left = new std::vector<std::unique_ptr<Operation>>;  // never freed
  if (!operation->runs()) return;
  MutexLock lock(mutex);
  left->push_back(std::move(operation));
}

}  // namespace lockstep::collective::mpi
