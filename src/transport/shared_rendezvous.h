// How the processes of a host come to share a space.
#pragma once

#include <cstdint>
#include <memory>

#include "transport/all_gather.h"
#include "transport/shared_space.h"

namespace lockstep::transport {

// Rank 0 makes the memory; `layout` must be equal on all ranks. Rank 0 hands the memory to processes of its user, over
// a Unix socket with a random name in the abstract namespace. Each rank gets a pidfd of every other. Collective.
// `names` are SpaceMember's. Throws ClusterError, and DeadlineExceeded naming the ranks that did not come.
struct SharedRendezvous {
  std::unique_ptr<SpaceMember> member;
  std::vector<FileDescriptor> heaps;  // [rank]: a file of memory that the rank alone lets grow
};
SharedRendezvous rendezvous_in_shared_memory(int rank, const SpaceLayout& layout, std::int64_t generation,
                                             SpinThenBlock spin, const std::vector<int>& names,
                                             const AllGather& all_gather, Deadline deadline);

}  // namespace lockstep::transport
