// The backends "tcp" and "ucx": messages over a network.
#include "collective/make.h"
#include "collective/message_passing/message_group.h"
#include "transport/socket_channels.h"
#include "transport/ucx_channels.h"

namespace lockstep::collective {

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
