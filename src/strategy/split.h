// How a global batch is divided among replicas.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "lockstep/dataset.h"
#include "lockstep/replica_values.h"

namespace lockstep {

// Consecutive examples on each replica's device, in replica order: views where that is the batch's. Sizes differ by one
// at most, the larger first; some may be 0. Throws InvalidArgument when the batch has no leading dimension.
PerReplica<Example> split_batch(const Example& batch, const std::vector<c10::Device>& devices);

// Throws InvalidArgument unless x, y and weight begin with the same size, as a batch's do.
void check_batch(const Example& batch);

// A batch of the same kind without examples.
Example empty_like(const Example& batch);

}  // namespace lockstep
