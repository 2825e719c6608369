// Channels of TCP connections: one a pair of ranks for messages, and one for the failure channel.
#pragma once

#include <memory>
#include <vector>

#include "transport/channels.h"
#include "transport/connections.h"
#include "transport/failure_channel.h"

namespace lockstep::transport {

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

}  // namespace lockstep::transport
