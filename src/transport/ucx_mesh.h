// A mesh over UCX: RDMA where the hosts have it. The alarm goes over sockets.
#pragma once

#include <memory>

#include "transport/connections.h"
#include "transport/mesh.h"

namespace lockstep {

bool ucx_is_built();

// Why there is no UCX here; empty where there is.
std::string why_no_ucx();

// Collective. Throws InvalidArgument where this build or this machine has no UCX, ClusterError, and DeadlineExceeded
// naming the ranks that did not come.
std::unique_ptr<Mesh> make_ucx_mesh(const MeshOptions& options, const AllGather& all_gather, Deadline deadline);

}  // namespace lockstep
