#include "collective/direct_group.h"

#include <algorithm>
#include <array>
#include <optional>

#include "base/failure.h"
#include "base/text.h"
#include "collective/messages.h"
#include "kernels/reduce.h"

namespace lockstep::collective {
namespace {

using Kind = Call::Kind;

// Results of this size and more are written past the caches: they will not be read again before they are evicted.
constexpr std::size_t kStreamBytes = 4 << 20;

// Returns the bytes of this rank's input that the others need.
std::size_t input_bytes_of(const Call& call, int rank) {
  const bool only_root = call.kind == Kind::broadcast || call.kind == Kind::scatter;
  return only_root && rank != call.peer ? 0 : call.input.bytes();
}

std::vector<StagingSlot*> staging_slots_of(const transport::SpaceMember& member) {
  std::vector<StagingSlot*> slots;
  for (int r = 0; r < member.size(); ++r)
    slots.push_back(reinterpret_cast<StagingSlot*>(member.space().staging_slot(r)));
  return slots;
}

bool everyone_gets(const Call& call) { return call.kind == Kind::all_reduce; }

}  // namespace

transport::SpaceLayout DirectGroup::layout(int ranks) {
  return {
      .ranks = ranks, .staging_slot_bytes = sizeof(StagingSlot), .mailbox_bytes = transport::Mailbox::bytes_for(ranks)};
}

DirectGroup::DirectGroup(std::shared_ptr<transport::SpaceMember> member)
    : member_(std::move(member)),
      staging_slots_(staging_slots_of(*member_)),
      channels_(member_),
      inputs_(static_cast<std::size_t>(member_->size())) {}

const char* DirectGroup::run(const Call& call, Deadline deadline) {
  switch (call.kind) {
    case Kind::send:
    case Kind::recv: return exchange({&call, 1}, deadline);
    case Kind::barrier: exchange_descriptors(call, deadline); return "direct";
    case Kind::all_reduce:
    case Kind::reduce:
    case Kind::reduce_scatter: return reduce(call, deadline);
    default: return pull(call, deadline);
  }
}

const char* DirectGroup::exchange(std::span<const Call> calls, Deadline deadline) {
  exchange_messages(channels_, calls, deadline);
  return "mailbox";
}

// Shows my call, waits for the others', and throws on every rank where they differ.
DirectGroup::Path DirectGroup::exchange_descriptors(const Call& call, Deadline deadline) {
  const char* operation = name_of(call.kind);
  member_->check();
  map_new_segments();
  ++posted_;
  auto& mine = descriptor(rank());
  mine.signature = signature_of(call);
  mine.input_bytes = input_bytes_of(call, rank());
  mine.input_at = mine.input_bytes == 0 ? 0 : location_of(call.input);
  mine.output_at = call.output.count == 0 ? 0 : location_of(call.output);
  if (mine.input_bytes <= CallDescriptor::kSmall) copy_bytes(mine.payload(), bytes_of(call.input), mine.input_bytes);
  fail_point("direct.before_descriptor");
  mine.sequence.set(posted_);
  fail_point("direct.descriptor_written");
  member_->wait_for_all([this](int r) -> transport::Signal& { return descriptor(r).sequence; }, posted_, deadline,
                        operation);
  fail_point("direct.descriptors_read");

  bool small = true, direct = true;
  const auto& first = descriptor(0).signature;
  for (int r = 0; r < size(); ++r) {
    const auto& other = descriptor(r);
    if (!(other.signature == first)) throw_calls_differ(0, first, r, other.signature);
    small = small && other.input_bytes <= CallDescriptor::kSmall;
    direct = direct && other.input_at != CallDescriptor::kPrivate && other.output_at != CallDescriptor::kPrivate;
  }
  return small ? Path::small : direct ? Path::direct : Path::staged;
}

std::vector<Memory> DirectGroup::allocate_shared(std::size_t bytes, Deadline deadline) {
  struct Part {
    std::int64_t location;
    std::uint64_t bytes;
    const Memory* memory;
  };
  static_assert(sizeof(Part) == 3 * sizeof(std::int64_t));
  Memory mine;
  std::exception_ptr failed;  // thrown when the others know
  try {
    mine = allocate(bytes);
  } catch (const std::exception&) {
    failed = std::current_exception();
  }
  for (int i = 0; i < 2; ++i) run(Call::barrier(), deadline);  // all have allocated; all have mapped the others'
  Part part{failed ? CallDescriptor::kPrivate : location_of({mine.get(), bytes, DType::uint8}), bytes, &mine};
  std::vector<Part> all(static_cast<std::size_t>(size()));
  run(Call::all_gather({&part, 3, DType::int64}, {all.data(), 3 * all.size(), DType::int64}), deadline);
  bool reached = true;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].bytes != all[0].bytes) {
      throw InvalidArgument(text("the ranks' calls differ: rank 0 calls allocate_shared with ", all[0].bytes,
                                 " bytes, rank ", r, " with ", all[r].bytes));
    }
    reached = reached && all[r].location != CallDescriptor::kPrivate;
  }
  if (failed) std::rethrow_exception(failed);
  std::vector<Memory> parts;
  if (!reached) return parts;
  {
    const transport::SpaceMember::RemoteAccess here(*member_);
    for (int r = 0; r < size(); ++r) {
      const auto& theirs = all[static_cast<std::size_t>(r)];
      parts.push_back(r == rank() ? mine : memory_at(r, theirs.location, bytes, theirs.memory));
    }
  }
  run(Call::barrier(), deadline);  // nobody reads `mine` any more
  return parts;
}

void DirectGroup::meet_within(const char* operation, Deadline deadline) {
  fail_point("direct.before_synchronize");
  staging_slot(rank()).done.set(++synchronized_);
  member_->wait_for_all([this](int r) -> transport::Signal& { return staging_slot(r).done; }, synchronized_, deadline,
                        operation);
  fail_point("direct.synchronized");
}

Slice DirectGroup::my_slice(const Call& call) const {
  if (call.kind == Kind::reduce_scatter) return share_of(call.counts, call.output.count, rank());
  return even_slice(call.input.count, call.input.dtype, rank(), size());
}

// Bytes of the input that came with the rank's descriptor.
const std::byte* DirectGroup::payload_of(int rank, std::size_t at, std::size_t bytes) const {
  auto& from = descriptor(rank);
  if (from.input_bytes > CallDescriptor::kSmall || at + bytes > from.input_bytes) {
    throw ClusterError(
        text("rank ", rank, " showed ", from.input_bytes, " bytes where ", at + bytes, " were expected"));
  }
  return from.payload() + at;
}

// outputs <- the reduction of `count` elements of each input_of(r), in the order of ranks. Large results are reduced
// piece by piece in the first-level cache, and then written past the caches.
template <class InputOf>
void DirectGroup::reduce_into(const Call& call, std::size_t count, const InputOf& input_of,
                              std::span<void* const> outputs) {
  if (count == 0) return;
  const auto element = size_of(call.input.dtype);
  for (int r = 0; r < size(); ++r) inputs_[static_cast<std::size_t>(r)] = input_of(r);
  if (call.input.bytes() < kStreamBytes) return kernels::reduce(call.op, call.input.dtype, inputs_, outputs, count);
  alignas(64) std::array<std::byte, 4096> piece;
  void* const pieces[] = {piece.data()};
  const std::size_t step = piece.size() / element;
  for (std::size_t at = 0; at < count; at += step) {
    const auto n = std::min(step, count - at);
    kernels::reduce(call.op, call.input.dtype, inputs_, pieces, n);
    for (auto* const output : outputs) {
      kernels::copy_past_caches(static_cast<std::byte*>(output) + at * element, piece.data(), n * element);
    }
    for (auto& input : inputs_) input = static_cast<const std::byte*>(input) + n * element;
  }
  kernels::finish_copies();
}

const char* DirectGroup::reduce(const Call& call, Deadline deadline) {
  const auto path = exchange_descriptors(call, deadline);
  const auto element = size_of(call.input.dtype);
  outputs_.clear();
  if (path == Path::small) {
    const bool whole = everyone_gets(call) || (call.kind == Kind::reduce && rank() == call.peer);
    const Slice wanted = whole                               ? Slice{0, call.input.count}
                         : call.kind == Kind::reduce_scatter ? my_slice(call)
                                                             : Slice{};
    outputs_.push_back(call.output.data);
    reduce_into(
        call, wanted.count(), [&](int r) { return payload_of(r, wanted.begin * element, wanted.count() * element); },
        outputs_);
    return "direct, small";
  }
  if (path == Path::staged) {
    reduce_staged(call, deadline);
    return "direct, staged";
  }
  const auto range = my_slice(call);
  const auto begin = range.begin * element;
  if (call.kind == Kind::reduce_scatter) outputs_.push_back(call.output.data);
  for (int r = 0; r < size() && call.kind != Kind::reduce_scatter; ++r) {
    if (!everyone_gets(call) && r != call.peer) continue;
    outputs_.push_back(address_at(r, descriptor(r).output_at, call.input.bytes()) + begin);
  }
  {
    const transport::SpaceMember::RemoteAccess here(*member_);
    fail_point("direct.remote_access");
    reduce_into(
        call, range.count(), [&](int r) { return address_at(r, descriptor(r).input_at, call.input.bytes()) + begin; },
        outputs_);
  }
  meet_within(name_of(call.kind), deadline);
  return "direct";
}

// Window by window: everybody copies what the others need of its input, reduces its slice, and copies the others' sums.
void DirectGroup::reduce_staged(const Call& call, Deadline deadline) {
  const auto element = size_of(call.input.dtype);
  const char* operation = name_of(call.kind);
  const bool scatters = call.kind == Kind::reduce_scatter;
  const bool gets = everyone_gets(call) || (call.kind == Kind::reduce && rank() == call.peer);
  const auto my_range = scatters ? share_of(call.counts, call.output.count, rank()) : Slice{};
  const std::size_t step = StagingSlot::kWindow / element;
  for (std::size_t begin = 0; begin < call.input.count; begin += step) {
    const Slice window{begin, std::min(begin + step, call.input.count)};
    const auto slice_in_window = [&](int r) {
      if (!scatters) {
        const auto part = even_slice(window.count(), call.input.dtype, r, size());
        return Slice{begin + part.begin, begin + part.end};
      }
      const auto part = share_of(call.counts, call.output.count, r);
      const auto first = std::clamp(part.begin, window.begin, window.end);
      return Slice{first, std::clamp(part.end, first, window.end)};
    };
    const auto staged = [&](std::size_t at) { return (at - begin) * element; };
    for (int r = 0; r < size(); ++r) {
      const auto theirs = slice_in_window(r);
      if (r == rank() || theirs.count() == 0) continue;
      copy_bytes(staging_slot(rank()).input + staged(theirs.begin), bytes_of(call.input) + theirs.begin * element,
                 theirs.count() * element);
    }
    meet_within(operation, deadline);

    const auto mine = slice_in_window(rank());
    auto* const own = bytes_of(call.output) + (mine.begin - my_range.begin) * element;
    outputs_.clear();
    if (gets || scatters) outputs_.push_back(own);
    if (!scatters) outputs_.push_back(staging_slot(rank()).sum + staged(mine.begin));
    const auto input_of = [&](int r) -> const std::byte* {
      return r == rank() ? bytes_of(call.input) + mine.begin * element : staging_slot(r).input + staged(mine.begin);
    };
    reduce_into(call, mine.count(), input_of, outputs_);
    meet_within(operation, deadline);

    for (int r = 0; gets && r < size(); ++r) {
      const auto theirs = slice_in_window(r);
      if (r == rank() || theirs.count() == 0) continue;
      copy_bytes(bytes_of(call.output) + theirs.begin * element, staging_slot(r).sum + staged(theirs.begin),
                 theirs.count() * element);
    }
  }
}

const char* DirectGroup::pull(const Call& call, Deadline deadline) {
  std::vector<std::size_t> all_counts;
  if (call.kind == Kind::all_to_all && !call.counts.empty()) {
    all_counts = gather_counts(*this, call, deadline);
  }
  const auto path = exchange_descriptors(call, deadline);
  const auto transfers = transfers_of(call, rank(), size(), all_counts);
  if (path == Path::staged) {
    pull_staged(call, transfers, deadline);
    return "direct, staged";
  }
  std::optional<transport::SpaceMember::RemoteAccess> here;
  if (path == Path::direct) here.emplace(*member_);
  for (const auto& transfer : transfers) {
    if (transfer.bytes == 0) continue;
    const auto* input =
        path == Path::small
            ? payload_of(transfer.from, transfer.at, transfer.bytes)
            : address_at(transfer.from, descriptor(transfer.from).input_at, transfer.at + transfer.bytes) + transfer.at;
    copy_bytes(bytes_of(call.output) + transfer.into, input, transfer.bytes);
  }
  here.reset();
  if (path == Path::small) return "direct, small";
  meet_within(name_of(call.kind), deadline);
  return "direct";
}

// Window by window: each rank copies its input to its staging slot, and copies what it needs from the others' slots.
void DirectGroup::pull_staged(const Call& call, std::span<const Transfer> transfers, Deadline deadline) {
  const char* operation = name_of(call.kind);
  std::size_t longest = 0;
  for (int r = 0; r < size(); ++r) longest = std::max<std::size_t>(longest, descriptor(r).input_bytes);
  const auto my_bytes = input_bytes_of(call, rank());
  for (std::size_t begin = 0; begin < longest; begin += StagingSlot::kWindow) {
    const auto end = begin + StagingSlot::kWindow;
    if (begin < my_bytes) {
      copy_bytes(staging_slot(rank()).input, bytes_of(call.input) + begin, std::min(end, my_bytes) - begin);
    }
    meet_within(operation, deadline);
    for (const auto& transfer : transfers) {
      const auto first = std::max(transfer.at, begin);
      const auto last = std::min(transfer.at + transfer.bytes, end);
      if (first >= last) continue;
      copy_bytes(bytes_of(call.output) + transfer.into + (first - transfer.at),
                 staging_slot(transfer.from).input + (first - begin), last - first);
    }
    meet_within(operation, deadline);
  }
}

}  // namespace lockstep::collective
