#include "transport/network_channels.h"

#include <algorithm>
#include <deque>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/ucx/worker.h"

namespace lockstep::transport {
namespace {

using ucx::Request;

// Messages go in pieces of this size, so that a receiver folds one while the next is on its way.
constexpr std::size_t kPiece = 512 * 1024;
// Pieces of one message that are on their way at once.
constexpr std::size_t kAtOnce = 4;

// A rank that leaves waits so long for the others to leave as well.
constexpr std::chrono::seconds kForTheLast(1);

// The wait for data of a rank that has left: RDMA does not report that a peer has gone.
constexpr std::chrono::milliseconds kForTheGone(100);

struct Slot {
  alignas(64) std::byte bytes[kPiece];
};

// A message that goes, piece by piece.
struct Sending {
  const Outgoing* message;
  std::size_t begun = 0;
  std::deque<Request> going;
  bool whole = false;

  int other() const { return message->to; }
  bool finished() const { return whole && going.empty(); }
};

// A message that is being received.
struct Receiving {
  const Incoming* message;
  struct Piece {
    Request request;
    std::size_t at, bytes;
    std::unique_ptr<Slot> slot;  // where there is a consumer
  };
  std::size_t begun = 0;
  bool whole = false;
  std::deque<Piece> coming;

  int other() const { return message->from; }
  bool finished() const { return whole && coming.empty(); }
};

class UcxChannels final : public Channels {
 public:
  UcxChannels(const ChannelOptions& options, const AllGather& all_gather, Deadline deadline)
      : spin_(options.spin),
        worker_(std::make_unique<ucx::Worker>(options.rank, options.size, options.address)),
        failure_channel_(options.rank, options.generation, options.lost_host_seconds,
                         std::move(connect_all(options, 1, all_gather, deadline)[0])) {
    const auto addresses = all_gather(worker_->address());
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) worker_->connect(r, addresses[static_cast<std::size_t>(r)]);
    }
    greet(deadline);
    greet(deadline);  // the first needs the receiver to make progress; after a second both ends are connected
  }

  // Data in flight is lost with its endpoint: the others get a moment to receive it, and to be told that theirs has
  // arrived.
  ~UcxChannels() override {
    if (broken_) return;
    const auto until = Deadline::after(kForTheLast);
    std::vector<Request> flushes;
    for (int r = 0; r < size(); ++r) {
      if (r != rank() && !worker_->broken(r)) flushes.push_back(worker_->flush(r));
    }
    for (const auto& flush : flushes) {
      progress_until([&] { return flush.ended(); }, until);
    }
    failure_channel_.leave();
    progress_until([this] { return failure_channel_.alone(); }, until);
  }

  int rank() const override { return failure_channel_.rank(); }
  int size() const override { return failure_channel_.size(); }

  void exchange(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming, Deadline deadline,
                const char* operation) override {
    failure_channel_.check();
    if (broken_) throw Aborted("the group was aborted: a message did not end");
    fail_point("ucx.before_exchange");
    std::deque<Sending> sendings;
    std::deque<Receiving> receivings;
    for (const auto& message : outgoing) sendings.push_back({&message, 0, {}});
    for (const auto& message : incoming) receivings.push_back({&message, 0, false, {}});
    try {
      move_all(sendings, receivings, deadline, operation);
    } catch (...) {
      take_buffers_back(sendings, receivings);
      throw;
    }
  }

  void fail(const Failure& failure) override { failure_channel_.fail(failure); }
  void give_up(std::span<const int> late, Deadline deadline, const char* operation) override {
    failure_channel_.give_up(late, deadline, operation);
  }
  void check() override { failure_channel_.check(); }
  void look(const char* operation, bool also_left) override { failure_channel_.look(operation, also_left); }
  ShownNumbers& numbers() override { return failure_channel_; }

 private:
  template <class Done>
  void progress_until(const Done& done, Deadline until) {
    while (!done() && !until.passed()) {
      pollfd channel{worker_->descriptor(), POLLIN, 0};
      if (!worker_->progress() && worker_->arm()) failure_channel_.listen({&channel, 1}, until);
    }
  }

  // Cancels what is in flight, so that UCX no longer accesses the caller's buffers.
  void take_buffers_back(const std::deque<Sending>& sendings, const std::deque<Receiving>& receivings) {
    broken_ = true;
    worker_->disconnect();
    const auto ended = [&] {
      const auto sent = [](const Request& request) { return request.ended(); };
      const auto came = [](const Receiving::Piece& piece) { return piece.request.ended(); };
      return std::all_of(sendings.begin(), sendings.end(),
                         [&](const auto& s) { return std::all_of(s.going.begin(), s.going.end(), sent); }) &&
             std::all_of(receivings.begin(), receivings.end(),
                         [&](const auto& r) { return std::all_of(r.coming.begin(), r.coming.end(), came); });
    };
    const auto until = Deadline::after(kForTheLast);
    while (!ended() && !until.passed()) worker_->progress();
  }

  // True where the request is done. A failure that the other rank did not cause aborts the group in this rank's name.
  bool done(const Request& request, int other) {
    if (!request.ended()) return false;
    if (request.status() == UCS_OK) return true;
    if (!worker_->broken(other)) {
      fail(Failure::aborted(rank(), text("rank ", rank(), ": UCX, with rank ", other, ": ", request.reason())));
      failure_channel_.check();
    }
    return false;
  }

  // Exchanges empty messages, so that an unreachable rank is found here and not later.
  void greet(Deadline deadline) {
    std::vector<Outgoing> outgoing;
    std::vector<Incoming> incoming;
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      outgoing.push_back({r, nullptr, 0, {}});
      incoming.push_back({r, nullptr, 0, nullptr, {}});
    }
    exchange(outgoing, incoming, deadline, "connecting to other hosts");
  }

  void move_all(std::deque<Sending>& sendings, std::deque<Receiving>& receivings, Deadline deadline,
                const char* operation) {
    std::vector<int> late;
    // Moves what can move; returns whether anything did.
    const auto step = [&] {
      bool moved = worker_->progress();
      late.clear();
      moved |= move_in_order(sendings, late, [this](auto& sending) { return push(sending); });
      moved |= move_in_order(receivings, late, [this](auto& receiving) { return pull(receiving); });
      return moved;
    };
    while (true) {
      const bool moved = spin_until(spin_, [&] { return step() || late.empty(); });
      fail_point("ucx.in_exchange");
      if (late.empty()) return;
      if (moved || !worker_->arm()) {
        failure_channel_.check(late, deadline, operation);
        continue;
      }
      for (const int r : late) {
        if (worker_->broken(r) || (failure_channel_.gone(r) && !comes(kForTheGone)))
          failure_channel_.lost(r, operation);
      }
      pollfd channel{worker_->descriptor(), POLLIN, 0};
      failure_channel_.wait({&channel, 1}, late, deadline, operation);
    }
  }

  // True where UCX, which is armed, has something to do within this time.
  bool comes(std::chrono::milliseconds time) const {
    pollfd channel{worker_->descriptor(), POLLIN, 0};
    return poll(&channel, 1, static_cast<int>(time.count())) > 0;
  }

  bool push(Sending& sending) {
    const auto& message = *sending.message;
    bool moved = false;
    while (!sending.whole && sending.going.size() < kAtOnce) {
      const auto bytes = std::min(kPiece, message.bytes - sending.begun);
      sending.going.push_back(
          worker_->send(message.to, message.tag, message.bytes, message.data + sending.begun, bytes));
      sending.begun += bytes;
      sending.whole = sending.begun == message.bytes;
      moved = true;
    }
    while (!sending.going.empty() && done(sending.going.front(), message.to)) {
      sending.going.pop_front();
      moved = true;
    }
    return moved;
  }

  bool pull(Receiving& receiving) {
    const auto& message = *receiving.message;
    bool moved = false;
    while (!receiving.whole && receiving.coming.size() < kAtOnce) {
      const auto* const arrival = worker_->next(message.from);
      if (arrival == nullptr) break;
      const auto bytes = std::min(kPiece, message.bytes - receiving.begun);
      const auto& header = arrival->header;
      if (header.tag != message.tag || header.message_bytes != message.bytes || arrival->bytes != bytes) {
        throw WrongMessage{message.from, header.tag, header.message_bytes};
      }
      auto slot = message.consumer == nullptr ? nullptr : take_slot();
      auto* const into = slot == nullptr ? message.data + receiving.begun : slot->bytes;
      receiving.coming.push_back({worker_->take(message.from, into), receiving.begun, bytes, std::move(slot)});
      receiving.begun += bytes;
      receiving.whole = receiving.begun == message.bytes;
      moved = true;
    }
    while (!receiving.coming.empty() && done(receiving.coming.front().request, message.from)) {
      auto& piece = receiving.coming.front();
      if (piece.slot != nullptr) {
        if (piece.bytes > 0) (*message.consumer)(piece.at, piece.slot->bytes, piece.bytes);
        slots_.push_back(std::move(piece.slot));
      }
      receiving.coming.pop_front();
      moved = true;
    }
    return moved;
  }

  std::unique_ptr<Slot> take_slot() {
    if (slots_.empty()) return std::make_unique<Slot>();
    auto slot = std::move(slots_.back());
    slots_.pop_back();
    return slot;
  }

  const SpinThenBlock spin_;
  std::unique_ptr<ucx::Worker> worker_;
  bool broken_ = false;
  std::vector<std::unique_ptr<Slot>> slots_;
  FailureChannel failure_channel_;  // ends before the worker does, so that a goodbye comes before its end
};

}  // namespace

bool ucx_is_built() { return true; }

std::string why_no_ucx() {
  try {
    ucx::library();
    return "";
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

std::unique_ptr<Channels> make_ucx_channels(const ChannelOptions& options, const AllGather& all_gather,
                                            Deadline deadline) {
  return std::make_unique<UcxChannels>(options, all_gather, deadline);
}

}  // namespace lockstep::transport
