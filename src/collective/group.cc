#include "lockstep/collective/group.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <utility>

#include "base/text.h"
#include "collective/backend.h"
#include "collective/calls.h"
#include "collective/make.h"
#include "collective/work.h"

namespace lockstep {
namespace {

// Extra time after a call's deadline for the calls ahead of it to end.
constexpr std::chrono::seconds kExtraForReason(1);

// True where a and b can be packed into one all_reduce.
bool packs_with(const Call& a, const Call& b) {
  return a.kind == Call::Kind::all_reduce && b.kind == Call::Kind::all_reduce && a.op == b.op &&
         a.input.dtype == b.input.dtype && a.purpose == b.purpose;
}

}  // namespace

EnqueuedCalls GroupBackend::enqueue(std::span<const Call> calls, Deadline /*deadline*/) {
  throw InvalidArgument(text(name_of(calls[0].kind), ": the buffer is on ", name_of(collective::device_of(calls[0])),
                             "; this Group moves memory of the host: take with_gpus of it"));
}

Memory collective::private_memory(std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  auto* const memory = static_cast<std::byte*>(std::aligned_alloc(kPage, (bytes / kPage + 1) * kPage));
  if (memory == nullptr) throw std::bad_alloc();
  std::fill_n(memory, bytes, std::byte{0});
  return {memory, [](std::byte* data) { std::free(data); }};
}

struct Group::State {
  State(std::shared_ptr<GroupBackend> given, std::size_t bytes) : backend(std::move(given)), bytes_per_pack(bytes) {}
  ~State() {
    if (progress.busy()) {
      backend->fail(Failure::aborted(backend->rank(), text("rank ", backend->rank(), " gave up what it had started")));
    }
  }

  // Returns the number of the next turn. Throws InvalidArgument in a thread that has the turn, and would wait for
  // itself.
  std::uint64_t take_number() {
    if (has_turn == this)
      throw InvalidArgument("a function that Group::start runs calls its Group: it must make its calls by `run`");
    return ticket_lock.take_number();
  }

  // Waits for the turn of `number`, acts, and passes the turn on. A call that does not get its turn in time fails the
  // group. First the call ahead, whose deadline is often the same, may say whom it waited for.
  template <class Act>
  void in_turn(std::uint64_t number, Deadline deadline, const char* operation, const Act& act) {
    if (!ticket_lock.wait(number, deadline) && !ticket_lock.wait(number, Deadline::after(kExtraForReason))) {
      backend->fail(Failure::deadline(backend->rank(), {}, deadline.waited().count(), operation));
      ticket_lock.wait(number, Deadline::never());
    }
    struct Pass {
      collective::TicketLock& ticket_lock;
      std::uint64_t number;
      const State* outer;
      ~Pass() {
        has_turn = outer;
        ticket_lock.pass(number);
      }
    } pass{ticket_lock, number, std::exchange(has_turn, this)};
    act();
  }

  void check(const std::vector<Call>& calls) const {
    for (const auto& call : calls) {
      collective::check_call(call, backend->rank(), backend->size());
      if (collective::device_of(call) == collective::device_of(calls[0])) continue;
      throw InvalidArgument(text("calls that are made together have buffers on ",
                                 name_of(collective::device_of(calls[0])), " and on ",
                                 name_of(collective::device_of(call)), "; all must be on one device"));
    }
  }

  EnqueuedCalls enqueue(std::span<const Call> calls, Deadline deadline) {
    EnqueuedCalls enqueued;
    in_turn(take_number(), deadline, name_of(calls[0].kind), [&] { enqueued = backend->enqueue(calls, deadline); });
    return enqueued;
  }

  void run_grouped(const std::vector<Call>& calls, Deadline deadline);
  void run_packed(std::span<const Call> calls, Deadline deadline);

  static thread_local const State* has_turn;  // in this thread

  const std::shared_ptr<GroupBackend> backend;
  const std::size_t bytes_per_pack;
  collective::TicketLock ticket_lock;
  Memory pack;  // used by the thread that has the turn
  collective::ProgressThread progress;
  std::atomic<std::int64_t> numbered = 0;
};

thread_local const Group::State* Group::State::has_turn = nullptr;

// Consecutive calls of one kind are run together.
void Group::State::run_grouped(const std::vector<Call>& calls, Deadline deadline) {
  const std::span all(calls);
  for (std::size_t begin = 0, end = 0; begin < calls.size(); begin = end) {
    const auto& first = calls[begin];
    end = begin + 1;
    if (collective::is_message(first)) {
      while (end < calls.size() && collective::is_message(calls[end])) ++end;
      backend->exchange(all.subspan(begin, end - begin), deadline);
      continue;
    }
    std::size_t bytes = first.input.bytes();
    while (end < calls.size() && packs_with(first, calls[end]) && bytes + calls[end].input.bytes() <= bytes_per_pack) {
      bytes += calls[end++].input.bytes();
    }
    if (end - begin == 1) {
      backend->run(first, deadline);
    } else {
      run_packed(all.subspan(begin, end - begin), deadline);
    }
  }
}

void Group::State::run_packed(std::span<const Call> calls, Deadline deadline) {
  if (!pack) pack = backend->allocate(bytes_per_pack);
  std::size_t count = 0;
  const auto element = size_of(calls[0].input.dtype);
  for (const auto& call : calls) {
    collective::copy_bytes(pack.get() + count * element, collective::bytes_of(call.input), call.input.bytes());
    count += call.input.count;
  }
  auto together = Call::all_reduce({pack.get(), count, calls[0].input.dtype}, calls[0].op);
  together.tensors = calls[0].tensors;
  together.purpose = calls[0].purpose;
  backend->run(together, deadline);
  count = 0;
  for (const auto& call : calls) {
    collective::copy_bytes(collective::bytes_of(call.output), pack.get() + count * element, call.output.bytes());
    count += call.input.count;
  }
}

Group::Group(std::shared_ptr<GroupBackend> backend, std::size_t bytes_per_pack)
    : state_(std::make_shared<State>(std::move(backend), bytes_per_pack)) {}

int Group::rank() const { return state_->backend->rank(); }
int Group::size() const { return state_->backend->size(); }
std::string Group::backend() const { return state_->backend->name(); }
std::shared_ptr<GroupBackend> Group::shared_backend() const { return state_->backend; }
Group Group::with_backend(std::shared_ptr<GroupBackend> backend) const {
  return Group(std::move(backend), state_->bytes_per_pack);
}

void Group::run(const Call& call, Deadline deadline) const {
  collective::check_call(call, rank(), size());
  if (collective::is_on_gpu(call)) return state_->enqueue({&call, 1}, deadline).join();
  state_->in_turn(state_->take_number(), deadline, name_of(call.kind), [&] { state_->backend->run(call, deadline); });
}

void Group::run(const std::vector<Call>& calls, Deadline deadline) const {
  if (calls.empty()) return;
  state_->check(calls);
  if (collective::is_on_gpu(calls[0])) return state_->enqueue(calls, deadline).join();
  state_->in_turn(state_->take_number(), deadline, name_of(calls[0].kind),
                  [&] { state_->run_grouped(calls, deadline); });
}

Work Group::start(Call call, Deadline deadline) const { return start(std::vector{std::move(call)}, deadline); }

Work Group::start(std::vector<Call> calls, Deadline deadline) const {
  state_->check(calls);
  for (auto& call : calls) call.called = Deadline::Clock::now();
  if (!calls.empty() && collective::is_on_gpu(calls[0])) {
    auto work = std::make_shared<Work::State>();
    const auto enqueued = state_->enqueue(calls, deadline);
    work->enqueued = {
        .join = [state = state_, enqueued] { enqueued.join(); }, .done = enqueued.done, .ended = enqueued.ended};
    return Work(std::move(work));
  }
  auto* const state = state_.get();  // its destructor waits for the progress thread
  return state->progress.add([&]() -> std::function<void()> {
    return [state, deadline, calls = std::move(calls), number = state->take_number()] {
      state->in_turn(number, deadline, calls.empty() ? "nothing" : name_of(calls[0].kind),
                     [&] { state->run_grouped(calls, deadline); });
    };
  });
}

// The calls of `act` are one turn.
Work Group::start(std::function<void(const RunCalls& run)> act, MemoryDevice device, Deadline deadline) const {
  constexpr const char* kOperation = "a function that makes calls";
  auto* const state = state_.get();
  const auto act_in_turn = [state, deadline, act = std::move(act)](std::uint64_t number, const RunCalls& run) {
    state->in_turn(number, deadline, kOperation, [&] { act(run); });
  };
  if (device.type != MemoryDevice::Type::host) {
    auto work = std::make_shared<Work::State>();
    act_in_turn(state->take_number(), [state, deadline, work](const std::vector<Call>& calls) {
      state->check(calls);
      const auto enqueued = state->backend->enqueue(calls, deadline);
      enqueued.join();
      work->enqueued.ended = enqueued.ended;
    });
    work->finish(nullptr);
    return Work(std::move(work));
  }
  return state->progress.add([&]() -> std::function<void()> {
    return [state, deadline, act_in_turn, number = state->take_number()] {
      act_in_turn(number, [state, deadline](const std::vector<Call>& calls) {
        state->check(calls);
        state->run_grouped(calls, deadline);
      });
    };
  });
}

std::unique_ptr<Group> Group::split(int color, int key, Deadline deadline) const {
  const auto ranks = static_cast<std::size_t>(size());
  std::vector<std::int32_t> mine{color, key}, all(2 * ranks);
  all_gather(buffer_of(std::span(mine)), buffer_of(std::span(all)), deadline);
  std::vector<int> members;
  for (int r = 0; r < size(); ++r) {
    if (all[static_cast<std::size_t>(2 * r)] == color) members.push_back(r);
  }
  state_->in_turn(state_->take_number(), deadline, "split",
                  [&] { state_->backend->begin_split(color < 0 || members.size() == 1 ? -1 : color, key, deadline); });
  if (color < 0) return nullptr;
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return all[static_cast<std::size_t>(2 * a + 1)] < all[static_cast<std::size_t>(2 * b + 1)];
  });
  collective::GroupBootstrap bootstrap(*this, members, state_->backend->generation());
  return std::make_unique<Group>(with_backend(state_->backend->make(bootstrap, deadline)));
}

Memory Group::allocate(std::size_t bytes) const { return state_->backend->allocate(bytes); }

std::vector<Memory> Group::allocate_shared(std::size_t bytes, Deadline deadline) const {
  if (bytes == 0) throw InvalidArgument("allocate_shared: 0 bytes; it must be at least 1");
  std::vector<Memory> parts;
  state_->in_turn(state_->take_number(), deadline, "allocate_shared",
                  [&] { parts = state_->backend->allocate_shared(bytes, deadline); });
  return parts;
}

bool Group::reaches(MemoryDevice device, Deadline deadline) const {
  bool result = false;
  state_->in_turn(state_->take_number(), deadline, "reaches",
                  [&] { result = state_->backend->reaches(device, deadline); });
  return result;
}

void Group::check(Deadline deadline) const {
  constexpr const char* kOperation = "a check";
  state_->in_turn(state_->take_number(), deadline, kOperation,
                  [&] { state_->backend->look(kOperation, /*also_left=*/false); });
}

void Group::synchronize(Deadline deadline) const { state_->backend->synchronize(deadline); }

std::int64_t Group::next_number() const { return state_->numbered++; }

void Group::abort(const std::string& reason) const { state_->backend->fail(Failure::aborted(rank(), reason)); }

}  // namespace lockstep
