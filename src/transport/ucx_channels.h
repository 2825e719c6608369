// Channels over UCX: RDMA where the hosts have it. The failure channel uses sockets.
#pragma once

#include <memory>

#include "transport/channels.h"
#include "transport/connections.h"

namespace lockstep::transport {

bool ucx_is_built();

// Says why UCX is not available; empty where it is.
std::string why_no_ucx();

// Collective. Throws InvalidArgument where this build or this machine has no UCX, ClusterError, and DeadlineExceeded
// naming the ranks that did not come.
std::unique_ptr<Channels> make_ucx_channels(const ChannelOptions& options, const AllGather& all_gather,
                                            Deadline deadline);

}  // namespace lockstep::transport
