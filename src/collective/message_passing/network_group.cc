// The backends "tcp" and "ucx": messages over a network.
#include "collective/make.h"
#include "collective/message_passing/message_group.h"
#include "transport/socket_channels.h"
#include "transport/ucx_channels.h"

namespace lockstep {

std::shared_ptr<GroupBackend> make_network_backend(const std::string& network, Bootstrap& members, const Place& place,
                                                   const GroupOptions& options, SpinThenBlock spin, Deadline deadline) {
  const bool sockets = network == "tcp";
  const MessageGroup::MakeChannels make_channels = [=](Bootstrap& who, Deadline until) {
    const auto make = sockets ? make_socket_channels : make_ucx_channels;
    const AllGather all_gather = [&](const std::string& mine) { return who.all_gather(mine, until); };
    return make({who.rank(), who.size(), who.generation(), place.address, place.access, spin}, all_gather, until);
  };
  return std::make_shared<MessageGroup>(sockets ? "tcp" : "ucx", make_channels(members, deadline), members.generation(),
                                        options.implementation, make_channels);
}

}  // namespace lockstep
