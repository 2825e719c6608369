// The threads backend: ranks are threads, so a rank reads and writes the others' buffers directly. Every operation is:
// show my call, meet, check that the calls agree, do my slice for everybody, meet again.
#include <algorithm>
#include <array>
#include <cstring>

#include "base/text.h"
#include "collective/backend.h"
#include "collective/threads/thread_barrier.h"
#include "kernels/reduce.h"

namespace lockstep {
namespace {

// What a rank shows the others about its current call. A cache line each.
struct alignas(64) Call {
  const char* operation = "";
  Buffer input;
  Buffer output;
  int detail = 0;  // the ReduceOp, or the root

  bool agrees_with(const Call& other) const {
    return std::strcmp(operation, other.operation) == 0 && input.count == other.input.count &&
           input.dtype == other.input.dtype && output.count == other.output.count &&
           output.dtype == other.output.dtype && detail == other.detail;
  }
  std::string describe() const {
    return text(operation, " of ", input.count, " x ", name_of(input.dtype), " into ", output.count, " x ",
                name_of(output.dtype), " (", detail, ")");
  }
};

// Calls are shown in two sets in turn, so that a rank may show its next call while others still read this one: it
// cannot come to the call after next before all have met in the next.
struct Meeting {
  Meeting(int size, int spin)
      : barrier(size, spin),
        calls{std::vector<Call>(static_cast<std::size_t>(size)), std::vector<Call>(static_cast<std::size_t>(size))} {}

  ThreadBarrier barrier;
  std::array<std::vector<Call>, 2>
      calls;  // [turn][rank]; written by that rank only, before the barrier that lets others read
};

struct Slice {
  std::size_t begin;
  std::size_t end;
};

// Slice `rank` of `count` elements, cut at whole cache lines so that no two ranks write one line.
Slice slice_of(std::size_t count, DType dtype, int rank, int size) {
  const std::size_t line = 64 / size_of(dtype);
  const std::size_t lines = (count + line - 1) / line;
  const auto edge = [&](int r) {
    return std::min(count, lines * static_cast<std::size_t>(r) / static_cast<std::size_t>(size) * line);
  };
  return {edge(rank), edge(rank + 1)};
}

char* element(const Buffer& buffer, std::size_t index) {
  return static_cast<char*>(buffer.data) + index * size_of(buffer.dtype);
}

class ThreadGroup final : public GroupBackend {
 public:
  ThreadGroup(std::shared_ptr<Meeting> meeting, int rank) : meeting_(std::move(meeting)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(meeting_->calls[0].size()); }

  void all_reduce(Buffer buffer, ReduceOp op, Deadline deadline) override {
    meet({"all_reduce", buffer, buffer, static_cast<int>(op)}, deadline);
    const auto mine = slice_of(buffer.count, buffer.dtype, rank_, size());
    reduce_range(mine, op, [this](const char* sum, std::size_t at, std::size_t bytes) {
      for (const auto& other : calls()) std::memcpy(element(other.output, at), sum, bytes);
    });
    meeting_->barrier.wait(deadline, "all_reduce");
  }

  void broadcast(Buffer buffer, int root, Deadline deadline) override {
    meet({"broadcast", buffer, buffer, root}, deadline);
    if (root < 0 || root >= size()) {
      throw InvalidArgument(text("broadcast: root is ", root, "; the group has ranks 0 to ", size() - 1));
    }
    if (rank_ != root && buffer.count > 0) std::memcpy(buffer.data, call(root).input.data, buffer.bytes());
    meeting_->barrier.wait(deadline, "broadcast");
  }

  void all_gather(Buffer input, Buffer output, Deadline deadline) override {
    meet({"all_gather", input, output, 0}, deadline);
    require_slices("all_gather", output, input);
    for (int r = 0; r < size() && input.count > 0; ++r) {
      std::memcpy(element(output, static_cast<std::size_t>(r) * input.count), call(r).input.data, input.bytes());
    }
    meeting_->barrier.wait(deadline, "all_gather");
  }

  void reduce_scatter(Buffer input, Buffer output, ReduceOp op, Deadline deadline) override {
    meet({"reduce_scatter", input, output, static_cast<int>(op)}, deadline);
    require_slices("reduce_scatter", input, output);
    const auto begin = static_cast<std::size_t>(rank_) * output.count;
    reduce_range({begin, begin + output.count}, op, [&](const char* sum, std::size_t at, std::size_t bytes) {
      std::memcpy(element(output, at - begin), sum, bytes);
    });
    meeting_->barrier.wait(deadline, "reduce_scatter");
  }

  void barrier(Deadline deadline) override { meet({"barrier", {}, {}, 0}, deadline); }
  void abort(const std::string& reason) override { meeting_->barrier.abort(reason); }

 private:
  const std::vector<Call>& calls() const { return meeting_->calls[turn_]; }
  const Call& call(int rank) const { return calls()[static_cast<std::size_t>(rank)]; }

  // Shows `mine`, waits for the others' calls, and throws on every rank when they differ.
  void meet(const Call& mine, Deadline deadline) {
    turn_ = 1 - turn_;
    meeting_->calls[turn_][static_cast<std::size_t>(rank_)] = mine;
    meeting_->barrier.wait(deadline, mine.operation);
    for (int r = 1; r < size(); ++r) {
      if (call(r).agrees_with(call(0))) continue;
      throw InvalidArgument(text("the ranks' calls differ: rank 0 calls ", call(0).describe(), ", rank ", r, " calls ",
                                 call(r).describe()));
    }
  }

  // After meet, so that what is wrong on all ranks is thrown on all.
  void require_slices(const char* operation, const Buffer& whole, const Buffer& slice) const {
    const auto wanted = slice.count * static_cast<std::size_t>(size());
    if (whole.count == wanted && whole.dtype == slice.dtype) return;
    throw InvalidArgument(text(operation, ": the whole is ", whole.count, " x ", name_of(whole.dtype), "; ", size(),
                               " slices of ", slice.count, " x ", name_of(slice.dtype), " make ", wanted));
  }

  // Reduces the range of all inputs in pieces that stay in the first-level cache, in rank order, and stores each.
  template <class Store>
  void reduce_range(Slice range, ReduceOp op, const Store& store) {
    const DType dtype = call(rank_).input.dtype;
    std::vector<const void*> inputs(calls().size());
    alignas(64) std::array<char, 4096> sum;
    const std::size_t step = sum.size() / size_of(dtype);
    for (std::size_t at = range.begin; at < range.end; at += step) {
      const std::size_t count = std::min(step, range.end - at);
      for (int r = 0; r < size(); ++r) inputs[static_cast<std::size_t>(r)] = element(call(r).input, at);
      kernels::reduce(op, dtype, inputs, sum.data(), count);
      store(sum.data(), at, count * size_of(dtype));
    }
  }

  const std::shared_ptr<Meeting> meeting_;
  const int rank_;
  std::size_t turn_ = 0;  // which set of calls the current operation uses; the same on all ranks
};

}  // namespace

std::vector<Group> make_thread_groups(int size, int spin) {
  if (size < 1) throw InvalidArgument(text("make_thread_groups: size is ", size, "; it must be at least 1"));
  auto meeting = std::make_shared<Meeting>(size, spin);
  std::vector<Group> groups;
  for (int rank = 0; rank < size; ++rank) groups.emplace_back(std::make_shared<ThreadGroup>(meeting, rank));
  return groups;
}

}  // namespace lockstep
