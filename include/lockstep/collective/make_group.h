// Groups of processes. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/cluster/store.h"
#include "lockstep/cluster/world.h"
#include "lockstep/collective/group.h"

namespace lockstep {

// The all_reduce algorithm of ranks that communicate by messages; see src/collective/message_passing/. ring,
// halving_doubling and tree send partial sums, which are rounded in every step for 16-bit elements.
enum class Implementation : std::uint8_t {
  automatic,                // by size, number of ranks and backend
  direct,                   // every rank sends to every rank: for a few bytes
  ring,                     // Patarasuk and Yuan, 2009
  halving_doubling,         // Thakur, Rabenseifner and Gropp, 2005
  tree,                     // binomial
  pairwise,                 // each slice is reduced at its owner, then a ring; 16-bit elements are rounded once
  reduction_to_one_device,  // rank 0 reduces for all
  nccl,                     // for buffers on GPUs, as gpu_backend = "nccl"; for others automatic
};
const char* name_of(Implementation implementation);            // "auto", "ring", ...
Implementation implementation_named(const std::string& name);  // throws InvalidArgument

inline constexpr double kLongestLostHostSeconds = 86400;  // of GroupOptions::lost_host_seconds

// Follows tf.distribute.experimental.CommunicationOptions, and the backends of torch.distributed.
struct GroupOptions {
  // "shm": all ranks share a host; "tcp" and "ucx": any hosts; "hierarchical": shared memory inside hosts and `network`
  // between them. "auto": shm where all share a host, `network` where none do, else hierarchical. "auto" is `network`,
  // with a warning, where a limit of some rank's process leaves no room for shared memory.
  // "mpi": the site's own MPI library, for ranks that are processes of one mpirun (docs/launchers/mpi.md). The library
  // is the launcher's, or LOCKSTEP_MPI_LIBRARY. Memory of `allocate` is moved in place, other memory through copies.
  std::string backend = "auto";

  // "tcp": sockets, the fastest over Ethernet; "ucx": UCX, for RDMA. UCX's own UCX_* variables apply; loading it with a
  // process's first such group changes the environment for a moment. Its connections are not authenticated: whoever
  // reaches them can read and write this process's memory. On loopback addresses that is any user of the host. So it is
  // for trusted networks and hosts. The UCX that tools/bootstrap installs has TCP only; for RDMA configure with the
  // site's own (1.22 or newer) in CMAKE_PREFIX_PATH.
  std::string network = "tcp";

  // How buffers on GPUs are moved (with_gpus in group_wrappers.h): "nccl", "host" or "auto".
  std::string gpu_backend = "auto";

  Implementation implementation = Implementation::automatic;

  std::size_t bytes_per_pack = Group::kBytesPerPack;  // of grouped all_reduces; see Group

  // The number of first collective calls that ranks without shared memory compare before they make them (with_checks in
  // group_wrappers.h); negative: all. Ranks with shared memory compare every call.
  std::int64_t checked_calls = 16;

  // A host that does not answer for so long (its system, not its processes) is lost: from 3 seconds to a day.
  double lost_host_seconds = kLostHostSeconds;

  // How long making the group waits for the other ranks; the error names those that have not come.
  double timeout_seconds = kStartTimeoutSeconds;

  // The bytes of shared memory that one rank's `allocate` can give out; 0: no bound. Memory is taken from the system as
  // needed. Where the system gives no more (ulimit -v, ulimit -f), `allocate` gives memory of this process alone, with
  // a warning.
  std::size_t heap_bytes = 0;
};

// Makes the Group of all ranks of `world`. Collective: all ranks make their groups in one order. Throws
// InvalidArgument. Throws ClusterError for two processes of one rank, or ranks that disagree about their number, and
// DeadlineExceeded naming the ranks that are missing.
Group make_group(const World& world, const Store& store, const GroupOptions& options = {});

}  // namespace lockstep
