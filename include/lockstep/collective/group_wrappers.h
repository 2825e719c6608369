// Groups over a Group: buffers on GPUs, checks that all ranks make the same calls, a timeline of what ran when, and
// faults for tests.
// Torch-free. Each wrapper takes the place of the Group that it wraps, which must not be used beside it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/collective/group.h"

namespace lockstep {

// Also moves buffers on GPUs, by `gpu_backend`, which is equal on all ranks:
//
//   "nccl"  from GPU to GPU by NCCL 2.27 or newer, a GPU a rank; int16, which NCCL lacks, is reduced as by "host"
//   "host"  through host memory, by the group that it wraps; each call waits for its stream
//   "auto"  by NCCL where every rank can, else through host memory, with a warning that says why
//
// LOCKSTEP_NCCL_LIBRARY names the library, else it is libnccl.so.2: LibTorch's, or the site's. The first call on a GPU
// is collective, and throws InvalidArgument on all ranks where one of them has no NCCL for "nccl". Groups that are
// split from it move such buffers too. Throws InvalidArgument for another gpu_backend. Follows torch.distributed's
// backend "cpu:gloo,cuda:nccl".
Group with_gpus(const Group& group, const std::string& gpu_backend = "auto");

// Before a collective call every rank tells its call. All throw InvalidArgument, naming every rank that differs from
// most. Checks the first `calls` calls, or all where it is negative. Costs one all_gather of 16 bytes a call. All ranks
// wrap alike. Groups that are split from it are checked too. Follows TORCH_DISTRIBUTED_DEBUG=DETAIL.
Group with_checks(const Group& group, std::int64_t calls = -1);

// Records the operations of one rank, for chrome://tracing and ui.perfetto.dev. Any thread.
class Timeline {
 public:
  Timeline();

  // Writes one file with a track for every rank of `group`. Collective. Throws IoError on rank 0.
  void write(const std::string& path, const Group& group, Deadline deadline) const;

  struct State;

 private:
  friend Group with_timeline(const Group& group, Timeline& timeline, Deadline deadline);
  std::shared_ptr<State> state_;
};

// Records every operation, but not those of groups that are split from it: when it was called, began and ended, its
// bytes and its algorithm. Collective: the ranks' clocks count from one barrier. Operations of one rank run one after
// the other, so the slices of a track never overlap. Calls on a GPU have a track of their own. They begin when they are
// enqueued and the call before has ended, and end when the GPU has done them.
Group with_timeline(const Group& group, Timeline& timeline, Deadline deadline);

// A fault on this rank, for tests.
struct Fault {
  enum class Action : std::uint8_t {
    delay,  // sleeps for `seconds`
    kill,   // SIGKILL to this process
    stop,   // SIGSTOP to this process
    abort,  // Group::abort
    error,  // throws Error
  };

  std::int64_t call = 0;  // in the call of this number, counted from 0,
  std::string place;      // when it first comes to this place; empty: before it begins
  Action action = Action::delay;
  double seconds = 0;
};

// Places are the names that the sources give to fail_point: "direct.descriptor_written", "tcp.in_exchange",
// "gpus.enqueued", ... Calls that are made together on a GPU count as one.
Group with_faults(const Group& group, std::vector<Fault> faults);

}  // namespace lockstep
