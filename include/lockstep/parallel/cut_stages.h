// Where to cut a model into stages of a pipeline, by what its layers cost.
//
//   std::vector<lockstep::PipelineStage> layers{[] { return Embed(); }, [] { return Block(); }, ..., [] { return
//   Head(); }}; const auto costs = lockstep::measure_layers(layers, x.narrow(0, 0, 4), mesh["pipeline"]);
//   lockstep::Pipeline pipeline(lockstep::join_layers(layers, lockstep::cut_stages(costs, mesh.size("pipeline"))),
//                               mesh["pipeline"]);
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"
#include "lockstep/parallel/pipeline.h"

namespace lockstep {

// The costs of one layer: seconds for forward and backward of a microbatch, bytes of its parameters, and bytes that
// forward keeps for the backward of one microbatch. The last are 0 on a GPU, and with LibTorch's own allocator
// (ops/memory.h).
struct LayerCost {
  double seconds = 0;
  double parameter_bytes = 0;
  double activation_bytes = 0;
};

// Collective. Runs each layer on rank 0: `x` [examples, ...] goes through the first layer, its output through the next,
// and so on. The seconds are the least of some runs; all ranks get the same. Layers are made one after the other, on
// x's device. The CPU's random generator is left as it was, so that initial values stay those of the seed. Throws what
// a layer throws, on all ranks.
std::vector<LayerCost> measure_layers(const std::vector<PipelineStage>& layers, const Tensor& x,
                                      const Communicator& ranks);

struct CutOptions {
  // The bound for a rank: parameter_copies times its parameters, and the activations of as many microbatches as
  // one_forward_one_backward keeps.
  double most_bytes = std::numeric_limits<double>::infinity();

  // The tensors of the parameters' size that a rank keeps: values, gradients, and two states of an optimizer.
  double parameter_copies = 4;
};

// The number of layers of each stage: the slowest stage is as fast as it can be. Throws InvalidArgument for fewer
// layers than stages, and where no cut keeps the bound.
std::vector<int> cut_stages(const std::vector<LayerCost>& layers, int stages, const CutOptions& options = {});

// Stages of so many layers each, whose modules are called "0", "1", ... by the layers' numbers in the model. Throws
// InvalidArgument where the numbers do not add up to that of the layers.
std::vector<PipelineStage> join_layers(const std::vector<PipelineStage>& layers,
                                       const std::vector<int>& layers_of_stages);

}  // namespace lockstep
