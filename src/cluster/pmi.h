// The process manager of MPICH (hydra), which keeps keys and values for the ranks that it started. Speaks PMI-1's wire
// protocol, over the descriptor that hydra leaves in PMI_FD.
#pragma once

#include <string>

#include "lockstep/base/deadline.h"

namespace lockstep::cluster {

// Broadcasts rank 0's text to all ranks. Collective, once a process; later calls return that text. A process that exits
// normally tells the process manager so. Throws ClusterError, DeadlineExceeded.
std::string share_through_pmi(int fd, bool is_rank_0, const std::string& mine, Deadline deadline);

}  // namespace lockstep::cluster
