// The backend "mpi": payloads go by the site's MPI library, and messages over TCP tell who is lost or late.
#include <sched.h>

#include <chrono>
#include <numeric>
#include <utility>

#include "base/failure.h"
#include "base/text.h"
#include "collective/make.h"
#include "collective/message_passing/message_group.h"
#include "collective/mpi/mpi_calls.h"
#include "collective/mpi/mpi_communicator.h"
#include "collective/mpi/operation.h"
#include "collective/wrappers/wrapper.h"
#include "kernels/reduce.h"

namespace lockstep::collective {
namespace {

using Clock = Deadline::Clock;
using Kind = Call::Kind;

constexpr const char* kMpi = "mpi";
constexpr std::chrono::milliseconds kBetweenLooks(1);
constexpr std::chrono::seconds kForLast(2);  // what a rank that has left had still to send

// An all_reduce of up to so many bytes, times the other ranks, is sent to all ranks as a whole.
constexpr std::size_t kAtOnceBytes = 3 * 1024;

class MpiGroup final : public Wrapper {
 public:
  MpiGroup(std::shared_ptr<MessageGroup> control, cluster::Bootstrap& members, mpi::Blocks blocks, bool shares_cores,
           Deadline deadline)
      : Wrapper(control),
        control_(std::move(control)),
        blocks_(std::move(blocks)),
        shares_cores_(shares_cores),
        communicator_(
            members, [this] { control_->look("making the group", /*also_left=*/true); }, deadline),
        operation_(std::make_unique<mpi::Operation>(blocks_)) {
    std::iota(others_.begin(), others_.end(), 0);
    std::erase(others_, rank());
  }

  const char* name() const override { return kMpi; }

  const char* run(const Call& call, Deadline deadline) override {
    if (is_message(call)) return exchange({&call, 1}, deadline);
    begin(call.kind);
    if (reduces_by_itself(call)) {
      on_behalf_of(call, [&] { reduce(call, deadline); });
    } else if (call.kind == Kind::all_to_all && !call.counts.empty()) {
      run_rounds(call, longest_of_all(call, deadline), deadline);
    } else {
      run_rounds(call, mpi::longest_share(call, size()), deadline);
    }
    return kMpi;
  }

  const char* exchange(std::span<const Call> calls, Deadline deadline) override {
    begin(calls[0].kind);
    std::vector<int> late;
    for (const auto& call : calls) late.push_back(call.peer);
    run_operation(calls[0].kind, late, deadline,
                  [&](auto& operation) { mpi::start_messages(operation, calls, ranks()); });
    return kMpi;
  }

  std::shared_ptr<GroupBackend> make(cluster::Bootstrap& members, Deadline deadline) const override {
    auto control = std::static_pointer_cast<MessageGroup>(control_->make(members, deadline));
    return std::make_shared<MpiGroup>(std::move(control), members, blocks_, shares_cores_, deadline);
  }

  Memory allocate(std::size_t bytes) override { return blocks_.allocate(bytes); }

 private:
  mpi::Ranks ranks() const { return {communicator_.handle(), rank(), size()}; }

  // A rank that comes late sees here that the others have given up, and does not enter MPI.
  void begin(Kind kind) {
    control_->check();
    if (Clock::now() - looked_ > kBetweenLooks) look_at_others(kind, /*also_left=*/false);
  }

  void look_at_others(Kind kind, bool also_left) {
    control_->look(name_of(kind), also_left);
    looked_ = Clock::now();
  }

  void run_rounds(const Call& call, std::size_t longest, Deadline deadline) {
    std::size_t begin = 0;
    do {  // runs for empty buffers too: whoever makes the call finds out who is lost
      const auto window = mpi::window_from(begin, longest, call, size());
      run_operation(call.kind, others_, deadline,
                    [&](auto& operation) { mpi::start_round(operation, call, window, ranks()); });
      begin += window.count;
    } while (begin < longest);
    const bool has_result = call.kind != Kind::reduce || rank() == call.peer;
    if (is_reduction(call.kind) && call.op == ReduceOp::mean && has_result) {
      kernels::divide(call.output.dtype, call.output.data, static_cast<std::size_t>(size()), call.output.count);
    }
  }

  // A failure leaves the calls alone that MPI has begun. The control plane knows the failures that it found itself.
  template <class Start>
  void run_operation(Kind kind, std::span<const int> late, Deadline deadline, const Start& start) {
    try {
      start(*operation_);
      fail_point("mpi.started");
      wait(kind, late, deadline);
      operation_->finish();
      return;
    } catch (const InvalidArgument&) {
      abandon();
      fail(Failure::aborted(rank(), "the ranks' messages differ"));
      throw;
    } catch (const mpi::CallFailed& error) {
      abandon();
      fail(Failure::aborted(rank(), text("rank ", rank(), ": ", error.what())));
      throw;
    } catch (...) {
      abandon();
      throw;
    }
  }

  void abandon() {
    communicator_.mark_failed();
    mpi::leave(std::exchange(operation_, std::make_unique<mpi::Operation>(blocks_)));
  }

  // Tests often at first. `late`: the ranks that may be waited for.
  void wait(Kind kind, std::span<const int> late, Deadline deadline) {
    const int spins = shares_cores_ ? 1 : 100;
    for (int i = 0; i < spins; ++i) {
      if (operation_->test()) return;
    }
    const auto start = Clock::now();
    while (!operation_->test()) {
      const auto now = Clock::now();
      if (now - looked_ > kBetweenLooks) look_at_others(kind, /*also_left=*/now - start > kForLast);
      if (now >= deadline.time()) control_->give_up(late, deadline, name_of(kind));
      if (shares_cores_) sched_yield();
    }
  }

  std::size_t longest_of_all(const Call& call, Deadline deadline) {
    auto longest = static_cast<std::int64_t>(mpi::longest_share(call, size()));
    const auto largest = Call::all_reduce({&longest, 1, DType::int64}, ReduceOp::max);
    on_behalf_of(call, [&] { run_rounds(largest, 1, deadline); });
    return static_cast<std::size_t>(longest);
  }

  // True where ranks send each other slices and reduce these by themselves. 16-bit floats, which MPI does not know, are
  // then rounded once. Among few ranks this takes half the time of Open MPI's MPI_Iallreduce. Among many ranks MPI
  // knows the network.
  bool reduces_by_itself(const Call& call) const {
    constexpr int kFewRanks = 4;
    return is_reduction(call.kind) && (kernels::is_half(call.input.dtype) || size() <= kFewRanks);
  }

  void reduce(const Call& call, Deadline deadline) {
    const auto count = call.input.count, ranks = static_cast<std::size_t>(size());
    if (call.kind == Kind::reduce_scatter) return reduce_shares(call, deadline);
    if (call.kind == Kind::all_reduce && call.input.bytes() * others_.size() <= kAtOnceBytes) {
      return reduce_slices(call, std::vector<Slice>(ranks, {0, count}), call.output.data, deadline);
    }
    const auto step = mpi::bytes_per_round(Kind::all_reduce, size()) / size_of(call.input.dtype);
    for (std::size_t begin = 0; begin < count; begin += step) {
      reduce_segment(call, {begin, std::min(begin + step, count)}, deadline);
    }
  }

  void reduce_shares(const Call& call, Deadline deadline) {
    const auto longest = mpi::longest_share(call, size());
    mpi::Window window;
    for (std::size_t begin = 0; begin < longest; begin += window.count) {
      window = mpi::window_from(begin, longest, call, size());
      const auto at = std::min(begin, call.output.count) * size_of(call.output.dtype);
      reduce_slices(call, mpi::slices_in(window, call.counts, call.output.count, size()), bytes_of(call.output) + at,
                    deadline);
    }
  }

  // Part of a reduce or an all_reduce: each rank reduces a slice, and sends it to the ranks that want it.
  void reduce_segment(const Call& call, const Slice& segment, Deadline deadline) {
    const auto dtype = call.input.dtype;
    const auto at = segment.begin * size_of(dtype);
    const auto wants = [&](int r) { return call.kind == Kind::all_reduce || r == call.peer; };
    std::vector<Slice> slices;
    for (int r = 0; r < size(); ++r) slices.push_back(even_slice(segment.count(), dtype, r, size()));
    const auto mine = slices[static_cast<std::size_t>(rank())];
    auto* const output = wants(rank()) ? bytes_of(call.output) + at : nullptr;
    const auto bytes = mine.count() * size_of(dtype);
    auto* const spare = scratch(bytes * (slices.size() + 1)) + bytes * slices.size();  // after what reduce_slices uses
    auto* const result = output == nullptr ? spare : output + mine.begin * size_of(dtype);
    auto part = call;
    part.input = {bytes_of(call.input) + at, segment.count(), dtype};
    reduce_slices(part, slices, result, deadline);
    swap(call.kind, deadline, [&](int r, mpi::Swap& with) {
      const auto theirs = slices[static_cast<std::size_t>(r)];
      if (wants(r)) with.sent = {result, mine.count(), dtype};
      if (output != nullptr) with.received = {output + theirs.begin * size_of(dtype), theirs.count(), dtype};
    });
  }

  // result <- this rank's slice of the reduction of call.input. Slices of two ranks may overlap.
  void reduce_slices(const Call& call, const std::vector<Slice>& slices, void* result, Deadline deadline) {
    const auto dtype = call.input.dtype;
    const auto mine = slices[static_cast<std::size_t>(rank())];
    const auto bytes = mine.count() * size_of(dtype);
    auto* const all = scratch(bytes * slices.size());
    inputs_.assign(slices.size(), bytes_of(call.input) + mine.begin * size_of(dtype));
    swap(call.kind, deadline, [&](int r, mpi::Swap& with) {
      const auto theirs = slices[static_cast<std::size_t>(r)];
      auto* const place = all + static_cast<std::size_t>(r) * bytes;
      inputs_[static_cast<std::size_t>(r)] = place;
      with.sent = {bytes_of(call.input) + theirs.begin * size_of(dtype), theirs.count(), dtype};
      with.received = {place, mine.count(), dtype};
    });
    void* const outputs[] = {result};
    kernels::reduce(call.op, dtype, inputs_, outputs, mine.count());
  }

  // fill(r, with) says what this rank swaps with rank r.
  template <class Fill>
  void swap(Kind kind, Deadline deadline, const Fill& fill) {
    swaps_.assign(static_cast<std::size_t>(size()), {});
    for (const int r : others_) fill(r, swaps_[static_cast<std::size_t>(r)]);
    run_operation(kind, others_, deadline, [&](auto& operation) { mpi::start_swaps(operation, swaps_, ranks()); });
  }

  std::byte* scratch(std::size_t bytes) {
    if (bytes > scratch_bytes_) {
      scratch_ = blocks_.allocate(bytes);
      scratch_bytes_ = bytes;
    }
    return scratch_.get();
  }

  const std::shared_ptr<MessageGroup> control_;
  mpi::Blocks blocks_;
  const bool shares_cores_;  // with other ranks
  mpi::MpiCommunicator communicator_;
  std::unique_ptr<mpi::Operation> operation_;
  std::vector<int> others_ = std::vector<int>(static_cast<std::size_t>(size()));
  Clock::time_point looked_ = Clock::now();
  Memory scratch_;  // what other ranks have sent for a reduction
  std::size_t scratch_bytes_ = 0;
  std::vector<const void*> inputs_;
  std::vector<mpi::Swap> swaps_;
};

}  // namespace

std::shared_ptr<GroupBackend> make_mpi_backend(cluster::Bootstrap& members, const Place& place,
                                               const GroupOptions& options, transport::SpinThenBlock spin,
                                               Deadline deadline) {
  const auto problems = members.all_gather(mpi::problem(), deadline);
  for (std::size_t r = 0; r < problems.size(); ++r) {
    if (!problems[r].empty()) throw InvalidArgument(text("make_group: rank ", r, ": ", problems[r]));
  }
  auto control =
      std::static_pointer_cast<MessageGroup>(make_network_backend("tcp", members, place, options, spin, deadline));
  return std::make_shared<MpiGroup>(std::move(control), members, mpi::Blocks(), spin.spins == 0, deadline);
}

}  // namespace lockstep::collective
