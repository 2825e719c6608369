// The ranks that take part in one operation, numbered from 0. All messages of the operation carry the same tag.
#pragma once

#include <span>
#include <vector>

#include "collective/calls.h"
#include "transport/channels.h"

namespace lockstep::collective {

// Memory that is taken again and again. Not zeroed; aligned to 64 bytes.
class Scratch {
 public:
  std::byte* take(std::size_t bytes);

 private:
  struct Free {
    void operator()(std::byte* memory) const { operator delete[](memory, std::align_val_t{64}); }
  };
  std::unique_ptr<std::byte[], Free> memory_;
  std::size_t bytes_ = 0;
};

// The operator and the element type of a reduction.
struct ElementOp {
  ReduceOp op;
  DType dtype;
  std::size_t element() const { return size_of(dtype); }
};

class Team {
 public:
  // `members`: ranks of `channels`, this one among them.
  Team(transport::Channels& channels, std::vector<int> members, const transport::MessageTag& tag, Deadline deadline,
       const char* operation, Scratch& scratch);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }

  // As Channels::exchange, with ranks of the team.
  void exchange(std::vector<transport::Outgoing> outgoing, std::vector<transport::Incoming> incoming);

  // One message to a rank and one from a rank, side by side.
  void swap(int to, std::span<const std::byte> out, int from, std::span<std::byte> in);

  // As swap, but folds what comes into `into` as it arrives.
  void swap_and_fold(int to, std::span<const std::byte> out, int from, const ElementOp& reduction, std::byte* into,
                     std::size_t count);

  void send(int to, std::span<const std::byte> bytes) { exchange({{to, bytes.data(), bytes.size(), {}}}, {}); }
  void receive(int from, std::span<std::byte> bytes) {
    exchange({}, {{from, bytes.data(), bytes.size(), nullptr, {}}});
  }
  void receive_and_fold(int from, const ElementOp& reduction, std::byte* into, std::size_t count);

  Scratch& scratch() { return scratch_; }

 private:
  transport::Channels& channels_;
  const std::vector<int> members_;
  const transport::MessageTag tag_;
  const Deadline deadline_;
  const char* const operation_;
  Scratch& scratch_;
  int rank_ = 0;
};

// Elements [slice.begin, slice.end) of an array of `element` bytes each.
inline std::span<std::byte> part_of(std::byte* data, const Slice& slice, std::size_t element) {
  return {data + slice.begin * element, slice.count() * element};
}

// A consumer that accumulates what arrives in `into`.
transport::Consumer folding(const ElementOp& reduction, std::byte* into);

}  // namespace lockstep::collective
