#include "collective/message_passing/message_group.h"

#include <numeric>

#include "collective/make.h"
#include "collective/message_passing/algorithms.h"
#include "collective/messages.h"
#include "transport/network_channels.h"

namespace lockstep::collective {

MessageGroup::MessageGroup(const char* name, std::unique_ptr<transport::Channels> channels, std::int64_t generation,
                           Implementation implementation, MakeChannels make_channels)
    : name_(name),
      channels_(std::move(channels)),
      generation_(generation),
      implementation_(implementation),
      make_channels_(std::move(make_channels)),
      everybody_(static_cast<std::size_t>(channels_->size())) {
  std::iota(everybody_.begin(), everybody_.end(), 0);
}

const char* MessageGroup::run(const Call& call, Deadline deadline) {
  if (is_message(call)) return exchange({&call, 1}, deadline);
  return run_among(everybody_, call, ++sequence_, deadline);
}

const char* MessageGroup::run_among(const std::vector<int>& members, const Call& call, std::uint32_t sequence,
                                    Deadline deadline) {
  channels_->check();
  std::vector<std::size_t> all_counts;
  if (call.kind == Call::Kind::all_to_all && !call.counts.empty()) all_counts = gather_counts(*this, call, deadline);
  const auto signature = signature_of(call);
  Team team(*channels_, members, pack(signature, sequence), deadline, name_of(call.kind), scratch_);
  try {
    return run_on_channels(team, call, implementation_, all_counts);
  } catch (const transport::WrongMessage& message) {
    // Messages are out of step from here on, on all ranks.
    fail(Failure::aborted(rank(), "the ranks' calls differ"));
    throw_wrong_message(message, rank(), signature, sequence);
  }
}

const char* MessageGroup::exchange(std::span<const Call> calls, Deadline deadline) {
  exchange_messages(*channels_, calls, deadline);
  return "message";
}

std::shared_ptr<GroupBackend> MessageGroup::make(cluster::Bootstrap& members, Deadline deadline) const {
  return std::make_shared<MessageGroup>(name_, make_channels_(members, deadline), members.generation(), implementation_,
                                        make_channels_);
}

// The backends "tcp" and "ucx": messages over a network.
std::shared_ptr<GroupBackend> make_network_backend(const std::string& network, cluster::Bootstrap& members,
                                                   const Place& place, const GroupOptions& options,
                                                   transport::SpinThenBlock spin, Deadline deadline) {
  const bool sockets = network == "tcp";
  const MessageGroup::MakeChannels make_channels = [=](cluster::Bootstrap& who, Deadline until) {
    const auto make = sockets ? transport::make_socket_channels : transport::make_ucx_channels;
    const transport::AllGather all_gather = [&](const std::string& mine) { return who.all_gather(mine, until); };
    return make(
        {who.rank(), who.size(), who.generation(), place.address, place.access, spin, options.lost_host_seconds},
        all_gather, until);
  };
  return std::make_shared<MessageGroup>(sockets ? "tcp" : "ucx", make_channels(members, deadline), members.generation(),
                                        options.implementation, make_channels);
}

}  // namespace lockstep::collective
