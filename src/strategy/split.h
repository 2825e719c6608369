// How a global batch is divided among replicas.
#pragma once

#include "lockstep/dataset.h"
#include "lockstep/replica_values.h"

namespace lockstep {

// Views of consecutive examples, in replica order. Sizes differ by one at most, the larger first; some may be 0. Throws
// InvalidArgument when the batch has no leading dimension.
PerReplica<Example> split_batch(const Example& batch, int replicas);

// A batch of the same kind without examples.
Example empty_like(const Example& batch);

}  // namespace lockstep
