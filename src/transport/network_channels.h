// Channels between hosts, over sockets or over UCX, and the channel on which hosts tell each other of failures.
#pragma once

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/failure.h"
#include "base/file.h"
#include "base/mutex.h"
#include "lockstep/base/deadline.h"
#include "transport/channels.h"
#include "transport/connections.h"
#include "transport/shown_numbers.h"

namespace lockstep::transport {

// One connection to each other rank that carries failures and shown numbers. When it ends, that rank is gone.
//
// One thread at a time waits and checks; any thread may call fail.
//
// When a deadline passes, ranks tell each other whom they wait for, and blame the awaited ranks that do not answer. So
// a rank does not blame a neighbour that itself waits for another one.
class FailureChannel final : public ShownNumbers {
 public:
  // `links[r]`: a connected socket to rank r; closed where r is `rank`. A host that does not answer for
  // `lost_host_seconds` is lost, though not one whose processes do not.
  FailureChannel(int rank, std::int64_t generation, double lost_host_seconds, std::vector<FileDescriptor> links);
  // Leaves. Does not wait.
  ~FailureChannel() override;
  FailureChannel(const FailureChannel&) = delete;
  FailureChannel& operator=(const FailureChannel&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(links_.size()); }

  // Tells every rank. Each rank keeps the first failure that reaches it: this one, unless two came at the same time.
  void fail(const Failure& failure);

  // Raises the failure that is kept.
  void check() {
    if (failed_.load(std::memory_order_acquire)) [[unlikely]]
      raise();
  }

  // Receives what the other ranks have sent. Raises the failure that is kept, and PeerLost for a rank that is gone
  // without a goodbye, or with one if `also_left`.
  void look(const char* operation, bool also_left);

  // Returns when poll(2) reports an event on `channels`; raises the failure that is kept, and DeadlineExceeded. `late`:
  // the ranks that are waited for.
  void wait(std::span<pollfd> channels, std::span<const int> late, Deadline deadline, const char* operation);

  // As wait, but returns at once: raises the failure that is kept, and DeadlineExceeded.
  void check(std::span<const int> late, Deadline deadline, const char* operation) {
    check();
    if (deadline.passed()) give_up(late, deadline, operation);
  }

  // Raises DeadlineExceeded, naming whom the ranks find to blame.
  [[noreturn]] void give_up(std::span<const int> late, Deadline deadline, const char* operation);

  // leave: says goodbye, so that others can tell leaving from dying. alone: whether all other ranks have left, or
  // something failed. listen: receives the other ranks' messages until poll(2) reports an event on `channels` or a
  // link.
  void leave();
  bool alone() const;
  void listen(std::span<pollfd> channels, Deadline deadline);

  void show(std::int64_t number) override { number_ = number; }
  void ask() override;
  void answer() override { listen({}, Deadline::after(std::chrono::seconds(0))); }
  Told told() override;

  // True where the link to `rank` has ended.
  bool gone(int rank) const { return links_[static_cast<std::size_t>(rank)].ended; }

  // A channel to `rank` has ended. Waits a moment for a message that says why, and raises PeerLost for who really is
  // lost.
  [[noreturn]] void lost(int rank, const char* operation);

 private:
  struct Notice;
  struct Link {
    FileDescriptor socket;
    std::vector<std::byte> partial_notice;  // bytes of an incomplete one
    bool ended = false;
    bool left = false;  // it said goodbye
    std::optional<Failure> last_error;
  };

  void receive(int rank);
  void take(int rank, const Notice& notice);
  bool is_first(const Failure& failure);  // keeps it and returns true where none was kept before
  void record(const Failure& failure);
  void send(const Failure& failure);
  void send_to(const Link& link, Notice notice) const;
  void keep_told(int rank, std::optional<std::int64_t> number, bool since_asked);
  std::optional<Failure> current_failure();
  [[noreturn]] void raise();
  [[noreturn]] void find_to_blame(std::span<const int> late, double seconds, const char* operation);

  const int rank_;
  const std::int64_t generation_;
  FileDescriptor wake_up_;   // an eventfd that fail() writes
  std::vector<Link> links_;  // used by the waiting thread, but for sending
  bool gave_up_ = false;     // of the thread that waits: it has told the others whom it waits for
  bool left_ = false;
  std::atomic<bool> failed_{false};
  std::atomic<std::int64_t> number_{0};  // that this rank shows
  Mutex mutex_;
  std::optional<Failure> failure_ LOCKSTEP_GUARDED_BY(mutex_);
  Told told_ LOCKSTEP_GUARDED_BY(mutex_);
};

// Calls move(message), which returns true where it moved something, for messages that are not finished; those of one
// pair of ranks go one after the other. Adds the other ranks of unfinished messages to `late`. Returns true where
// anything moved.
template <class Messages, class Move>
bool move_in_order(Messages& messages, std::vector<int>& late, const Move& move) {
  const auto before = static_cast<std::ptrdiff_t>(late.size());
  bool moved = false;
  for (auto& message : messages) {
    const int other = message.other();
    if (message.finished() || std::find(late.begin() + before, late.end(), other) != late.end()) continue;
    moved |= move(message);
    if (!message.finished()) late.push_back(other);
  }
  return moved;
}

// Channels of TCP connections: one a pair of ranks for messages, and one for the failure channel.
class SocketChannels final : public Channels {
 public:
  SocketChannels(const ChannelOptions& options, Sockets channels, Sockets alarms);
  ~SocketChannels() override;

  int rank() const override { return failure_channel_.rank(); }
  int size() const override { return failure_channel_.size(); }
  void exchange(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming, Deadline deadline,
                const char* operation) override;
  void fail(const Failure& failure) override { failure_channel_.fail(failure); }
  void give_up(std::span<const int> late, Deadline deadline, const char* operation) override {
    failure_channel_.give_up(late, deadline, operation);
  }
  void check() override { failure_channel_.check(); }
  void look(const char* operation, bool also_left) override { failure_channel_.look(operation, also_left); }
  ShownNumbers& numbers() override { return failure_channel_; }

 private:
  struct Header;
  struct Scratch;
  struct Sending;
  struct Receiving;

  bool push(Sending& sending, const char* operation);
  bool pull(Receiving& receiving, const char* operation);
  int channel(int rank) const { return channels_[static_cast<std::size_t>(rank)].get(); }

  const SpinThenBlock spin_;
  const Sockets channels_;
  FailureChannel failure_channel_;  // ends before the channels do, so that a goodbye comes before their end
  const std::unique_ptr<Scratch> scratch_;
};

// Collective. Throws as connect_all does.
std::unique_ptr<Channels> make_socket_channels(const ChannelOptions& options, const AllGather& all_gather,
                                               Deadline deadline);

// Channels over UCX: RDMA where the hosts have it. The failure channel uses sockets.
bool ucx_is_built();

// Says why UCX is not available; empty where it is.
std::string why_no_ucx();

// Collective. Throws InvalidArgument where this build or this machine has no UCX, ClusterError, and DeadlineExceeded
// naming the ranks that did not come.
std::unique_ptr<Channels> make_ucx_channels(const ChannelOptions& options, const AllGather& all_gather,
                                            Deadline deadline);

}  // namespace lockstep::transport
