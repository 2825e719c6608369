// Gradients of a model that is split over a mesh. Collective: all ranks of a mesh make the same calls.
#pragma once

#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"

namespace lockstep {

// Gives all ranks the mean of their gradients. Each rank has its part of the batch (mesh["data"]), and counts by its
// `examples`, 0 or more. Where only some ranks have a gradient, it counts as zero on the others. Where none has, it
// stays undefined, so that optimizers leave the parameter as it is. Sparse gradients become dense. A parameter that is
// divided among these ranks, or an expert's, has the sum over all ranks already, which becomes the mean. This is for
// gradients that were summed over several backwards, such as a Pipeline's; DistributedDataParallel averages while
// backward goes on. One thread a rank. Throws InvalidArgument for a negative `examples`, for parameters that
// fully_shard divided, and where ranks with divided parameters differ in `examples`. Throws it also where a batch
// normalization over these ranks (convert_sync_batchnorm) has weighed them otherwise in the last backward.
void average_gradients(const std::vector<Tensor>& parameters, const Communicator& ranks, double examples = 1);

// Scales the gradients so that their norm over the whole model is at most `max_norm`, and returns what the norm was.
// `parameters`: this rank's. The other parts of divided parameters count too, and one copy of those that tied stages
// share. `stages`: the ranks that have the other parameters, mesh["pipeline"]. Follows torch.nn.utils.clip_grad_norm_.
// Throws InvalidArgument for a norm that is not above 0.
double clip_grad_norm(const std::vector<Tensor>& parameters, double max_norm, const Communicator& stages = {});

}  // namespace lockstep
