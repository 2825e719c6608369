// A hook that replaces the default reduction of gradients between processes. Torch-free.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/collective/group.h"

namespace lockstep {

// Gradients that are reduced together.
struct GradientBucket {
  int index = 0;
  bool last = false;
  std::vector<std::string> parameters;  // in the order in which they lie in the buffer

  // The gradients one after the other, each times this rank's share of the examples. Then 1 for each parameter with a
  // gradient, else 0. In memory of the Group's, or on the parameters' GPU.
  Buffer buffer;
  void* stream = nullptr;  // where the buffer is on a GPU: a hook's calls must name it (Call::stream)
};

// Begins to make `bucket.buffer` its mean over the ranks of the group; it is used when the Work is done. Follows
// torch.nn.parallel.DistributedDataParallel.register_comm_hook. Called in the thread of backward, for bucket 0, 1, ...
using GradientHook = std::function<Work(const Group& group, const GradientBucket& bucket, Deadline deadline)>;

}  // namespace lockstep
