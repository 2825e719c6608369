#include "collective/mpi/mpi_calls.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "kernels/reduce.h"

namespace lockstep::collective::mpi {
namespace {

using Kind = Call::Kind;

constexpr int kTag = 0;
constexpr std::size_t kBytesPerMessage = std::size_t{64} << 20;

bool has_shares(Kind kind) {
  return kind != Kind::barrier && kind != Kind::all_reduce && kind != Kind::reduce && kind != Kind::broadcast;
}

// min and max where a NaN wins, as in all of our reductions. MPI leaves open what its own do.
template <ReduceOp op, DType dtype>
void reduce_with_nans(void* in, void* in_and_out, int* count, void* /*dtype*/) {
  kernels::accumulate(op, dtype, in_and_out, in, static_cast<std::size_t>(*count));
}

// Ranks reduce in one order, or they would differ in the sign of a zero.
Handle make_op(Reducer* reducer) {
  constexpr int kInOrder = 0;
  Handle op = 0;
  require(library().MPI_Op_create(reducer, kInOrder, &op), "MPI_Op_create");
  return op;
}

Handle op_for(ReduceOp op, DType dtype) {
  static const std::array made{make_op(&reduce_with_nans<ReduceOp::min, DType::float32>),
                               make_op(&reduce_with_nans<ReduceOp::max, DType::float32>),
                               make_op(&reduce_with_nans<ReduceOp::min, DType::float64>),
                               make_op(&reduce_with_nans<ReduceOp::max, DType::float64>)};
  const bool is_float = dtype == DType::float32 || dtype == DType::float64;
  if (is_float && (op == ReduceOp::min || op == ReduceOp::max)) {
    return made.at((dtype == DType::float64 ? 2 : 0) + (op == ReduceOp::max ? 1 : 0));
  }
  return library().constants.ops.at(static_cast<std::size_t>(op));
}

Slice slice_in(const Window& window, std::size_t count) {
  const auto from = std::min(window.begin, count);
  return {from, std::min(from + window.count, count)};
}

bool overlap(const ConstBuffer& a, const ConstBuffer& b) {
  return a.count > 0 && b.count > 0 && bytes_of(a) < bytes_of(b) + b.bytes() && bytes_of(b) < bytes_of(a) + a.bytes();
}

int number(const Slice& slice) { return static_cast<int>(slice.count()); }

// One round of one call.
class Round {
 public:
  Round(Operation& operation, const Call& call, const Window& window, const Ranks& ranks)
      : operation_(operation),
        call_(call),
        window_(window),
        ranks_(ranks),
        dtype_(library().dtype(call.input.dtype)),
        element_(size_of(call.input.dtype)),
        overlaps_(overlap(call.input, call.output)) {}

  void barrier() { operation_.call("MPI_Ibarrier", library().MPI_Ibarrier, ranks_.comm); }

  void all_reduce() {
    const auto slice = slice_in(window_, call_.output.count);
    auto* const data = operation_.updates(bytes_of(call_.output) + slice.begin * element_, slice.count() * element_);
    operation_.call("MPI_Iallreduce", library().MPI_Iallreduce, in_place(), data, number(slice), dtype_, op(),
                    ranks_.comm);
  }

  void reduce() {
    const auto slice = slice_in(window_, call_.input.count);
    const auto at = slice.begin * element_, bytes = slice.count() * element_;
    const void* input = in_place();
    void* output = nullptr;
    if (is_root() && call_.input.data == call_.output.data) {
      output = operation_.updates(bytes_of(call_.output) + at, bytes);
    } else {
      input = operation_.reads(bytes_of(call_.input) + at, bytes, is_root() && overlaps_);
      if (is_root()) output = operation_.writes(bytes_of(call_.output) + at, bytes);
    }
    operation_.call("MPI_Ireduce", library().MPI_Ireduce, input, output, number(slice), dtype_, op(), call_.peer,
                    ranks_.comm);
  }

  void broadcast() {
    const auto slice = slice_in(window_, call_.output.count);
    const auto at = slice.begin * element_, bytes = slice.count() * element_;
    auto* const data = is_root() ? const_cast<std::byte*>(operation_.reads(bytes_of(call_.output) + at, bytes))
                                 : operation_.writes(bytes_of(call_.output) + at, bytes);
    operation_.call("MPI_Ibcast", library().MPI_Ibcast, data, number(slice), dtype_, call_.peer, ranks_.comm);
  }

  void all_gather() {
    const auto& to = operation_.writes(call_.output, slices(call_.counts, call_.input.count));
    const auto [input, count] = gathered(to);
    operation_.call("MPI_Iallgatherv", library().MPI_Iallgatherv, input, count, dtype_, to.data, to.counts.data(),
                    to.places.data(), dtype_, ranks_.comm);
  }

  void gather() {
    static const Parts kNone;
    const auto& to = is_root() ? operation_.writes(call_.output, slices(call_.counts, call_.input.count)) : kNone;
    const auto [input, count] = gathered(to);
    operation_.call("MPI_Igatherv", library().MPI_Igatherv, input, count, dtype_, to.data, to.counts.data(),
                    to.places.data(), dtype_, call_.peer, ranks_.comm);
  }

  void scatter() {
    static const Parts kNone;
    const auto& from =
        is_root() ? operation_.reads(call_.input, slices(call_.counts, call_.output.count), false, overlaps_) : kNone;
    const auto slice = slice_in(window_, call_.output.count);
    auto* const to = operation_.writes(bytes_of(call_.output) + slice.begin * element_, slice.count() * element_);
    operation_.call("MPI_Iscatterv", library().MPI_Iscatterv, from.data, from.counts.data(), from.places.data(), dtype_,
                    to, number(slice), dtype_, call_.peer, ranks_.comm);
  }

  void reduce_scatter() {
    const auto& from = operation_.reads(call_.input, slices(call_.counts, call_.output.count), true, overlaps_);
    const auto slice = slice_in(window_, call_.output.count);
    auto* const to = operation_.writes(bytes_of(call_.output) + slice.begin * element_, slice.count() * element_);
    operation_.call("MPI_Ireduce_scatter", library().MPI_Ireduce_scatter, from.data, to, from.counts.data(), dtype_,
                    op(), ranks_.comm);
  }

  void all_to_all() {
    const auto ranks = static_cast<std::size_t>(ranks_.size);
    const auto& from = operation_.reads(call_.input, slices(call_.counts, call_.input.count / ranks), false, overlaps_);
    const auto& to = operation_.writes(call_.output, slices(call_.output_counts, call_.output.count / ranks));
    operation_.call("MPI_Ialltoallv", library().MPI_Ialltoallv, from.data, from.counts.data(), from.places.data(),
                    dtype_, to.data, to.counts.data(), to.places.data(), dtype_, ranks_.comm);
  }

 private:
  bool is_root() const { return ranks_.rank == call_.peer; }
  const void* in_place() const { return library().constants.in_place; }
  Handle op() const { return op_for(call_.op, call_.input.dtype); }
  std::vector<Slice> slices(const Counts& counts, std::size_t each) const {
    return slices_in(window_, counts, each, ranks_.size);
  }

  // This rank's part of what is gathered into `to`, which may have it already.
  std::pair<const void*, int> gathered(const Parts& to) {
    const auto slice = slice_in(window_, call_.input.count);
    const auto* const input = bytes_of(call_.input) + slice.begin * element_;
    const auto me = static_cast<std::size_t>(ranks_.rank);
    const bool has_output = !to.places.empty();
    const bool is_there =
        has_output && slice.count() > 0 && to.data + static_cast<std::size_t>(to.places[me]) * element_ == input;
    if (is_there) return {in_place(), number(slice)};
    return {operation_.reads(input, slice.count() * element_, has_output && overlaps_), number(slice)};
  }

  Operation& operation_;
  const Call& call_;
  const Window window_;
  const Ranks ranks_;
  const Handle dtype_;
  const std::size_t element_;
  const bool overlaps_;
};

}  // namespace

std::size_t longest_share(const Call& call, int size) {
  const auto ranks = static_cast<std::size_t>(size);
  std::size_t longest = 0;
  for (const auto* const counts : {&call.counts, &call.output_counts}) {
    for (const auto count : *counts) longest = std::max(longest, count);
  }
  if (!call.counts.empty()) return longest;
  switch (call.kind) {
    case Kind::scatter:
    case Kind::reduce_scatter: return call.output.count;
    case Kind::all_to_all: return call.input.count / ranks;
    default: return call.input.count;
  }
}

std::vector<Slice> slices_in(const Window& window, const Counts& counts, std::size_t each, int size) {
  std::vector<Slice> slices;
  std::size_t begin = 0;
  for (std::size_t r = 0; r < static_cast<std::size_t>(size); ++r) {
    const auto end = begin + (counts.empty() ? each : counts[r]);
    const auto from = std::min(begin + window.begin, end);
    slices.push_back({from, std::min(from + window.count, end)});
    begin = end;
  }
  return slices;
}

std::size_t bytes_per_round(Kind kind, int size) {
  constexpr std::size_t kMost = std::size_t{64} << 20, kSlice = std::size_t{1} << 20;
  return is_reduction(kind) ? std::min(kSlice * static_cast<std::size_t>(size), kMost) : kMost;
}

Window window_from(std::size_t begin, std::size_t longest, const Call& call, int size) {
  const auto shares = has_shares(call.kind) ? static_cast<std::size_t>(size) : 1;
  const auto most = bytes_per_round(call.kind, size) / size_of(call.input.dtype) / shares;
  return {begin, std::min(std::max<std::size_t>(most, 1), longest - begin)};
}

void start_round(Operation& operation, const Call& call, const Window& window, const Ranks& ranks) {
  Round round(operation, call, window, ranks);
  switch (call.kind) {
    case Kind::barrier: return round.barrier();
    case Kind::all_reduce: return round.all_reduce();
    case Kind::reduce: return round.reduce();
    case Kind::broadcast: return round.broadcast();
    case Kind::all_gather: return round.all_gather();
    case Kind::gather: return round.gather();
    case Kind::scatter: return round.scatter();
    case Kind::reduce_scatter: return round.reduce_scatter();
    case Kind::all_to_all: return round.all_to_all();
    case Kind::send:
    case Kind::recv: return start_messages(operation, {&call, 1}, ranks);
  }
}

// Each rank begins with the next one, so that they do not all send to one rank.
void start_swaps(Operation& operation, const std::vector<Swap>& swaps, const Ranks& ranks) {
  const auto& mpi = library();
  for (int distance = 1; distance < ranks.size; ++distance) {
    const int from = (ranks.rank + ranks.size - distance) % ranks.size;
    const auto& received = swaps[static_cast<std::size_t>(from)].received;
    if (received.count == 0) continue;
    const int count = static_cast<int>(received.count);
    auto* const place = operation.writes(bytes_of(received), received.bytes());
    operation.call("MPI_Irecv", mpi.MPI_Irecv, place, count, mpi.dtype(received.dtype), from, kTag, ranks.comm);
    operation.expect(from, count, mpi.dtype(received.dtype));
  }
  const void* last = nullptr;  // what goes to several ranks is copied once
  const std::byte* copy = nullptr;
  for (int distance = 1; distance < ranks.size; ++distance) {
    const int to = (ranks.rank + distance) % ranks.size;
    const auto& sent = swaps[static_cast<std::size_t>(to)].sent;
    if (sent.count == 0) continue;
    if (std::exchange(last, sent.data) != sent.data) copy = operation.reads(bytes_of(sent), sent.bytes());
    operation.call("MPI_Isend", mpi.MPI_Isend, copy, static_cast<int>(sent.count), mpi.dtype(sent.dtype), to, kTag,
                   ranks.comm);
  }
}

// Long messages go in pieces, which arrive in order.
void start_messages(Operation& operation, std::span<const Call> calls, const Ranks& ranks) {
  const auto& mpi = library();
  for (const auto& call : calls) {
    const bool sends = call.kind == Kind::send;
    const auto count = sends ? call.input.count : call.output.count;
    const auto element = size_of(call.input.dtype);
    const auto dtype = mpi.dtype(call.input.dtype);
    std::size_t begin = 0;
    do {  // runs for an empty message too, for which the other rank waits
      const auto at = begin * element;
      const auto piece = std::min(kBytesPerMessage / element, count - begin);
      const int length = static_cast<int>(piece);
      if (sends) {
        const auto* const from = operation.reads(bytes_of(call.input) + at, piece * element);
        operation.call("MPI_Isend", mpi.MPI_Isend, from, length, dtype, call.peer, kTag, ranks.comm);
      } else {
        auto* const to = operation.writes(bytes_of(call.output) + at, piece * element);
        operation.call("MPI_Irecv", mpi.MPI_Irecv, to, length, dtype, call.peer, kTag, ranks.comm);
        operation.expect(call.peer, length, dtype);
      }
      begin += piece;
    } while (begin < count);
  }
}

}  // namespace lockstep::collective::mpi
