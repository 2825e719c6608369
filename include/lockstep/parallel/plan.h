// plan_parallel: which split of a model over the ranks of a job is the fastest that fits, from what its layers and the
// links between the ranks cost here.
//
//   const auto plan = lockstep::plan_parallel(layers, x, y, loss, ranks, {.memory_bytes = 8e9, .tensor = patterns});
//   std::cout << plan.table();
//   lockstep::DeviceMesh mesh(plan.best().split.axes());
//
// The planner searches by a model of costs whose inputs are measured, as PipeDream (Narayanan et al. 2019), FlexFlow
// (Jia et al. 2019) and Alpa (Zheng et al. 2022) do. Here a divided layer is timed as such, with what it communicates,
// while all ranks compute.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"
#include "lockstep/parallel/pipeline.h"
#include "lockstep/parallel/split.h"
#include "lockstep/parallel/tensor_parallel.h"

namespace torch::optim {
class Optimizer;
}

namespace lockstep {

struct PlanOptions {
  // The ranks to plan for. 0: those that measure. For more ranks, costs that these cannot measure are computed from
  // costs that they did, and marked in the table.
  int ranks = 0;

  double memory_bytes = std::numeric_limits<double>::infinity();  // that a rank may use

  // How parallelize_module divides the layers: layer i's modules are called "i.name". Empty: no tensor parallelism.
  ParallelPlan tensor = {};

  // The numbers to try, where they divide the examples of a data rank; a pipeline tries none below its ranks where
  // others are left. The first whose step takes at most 1.02 of the fastest one's is chosen.
  std::vector<int> microbatches = {1, 2, 4, 8, 16};

  // The optimizer whose step is measured. Empty: torch::optim::AdamW.
  std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<Tensor> parameters)> optimizer = {};

  // The tensors that the optimizer keeps for each parameter, of its size: 2 for Adam and AdamW, 1 for SGD with
  // momentum.
  double optimizer_states = 2;
};

// Bytes of the rank that needs most.
struct SplitMemory {
  double parameters = 0;  // with fully_shard: this rank's part, and what is gathered at once
  double gradients = 0;
  double optimizer = 0;
  double activations = 0;  // of all microbatches that are kept for backward
  double working = 0;      // most of what an operation of forward or backward needs for itself

  double total() const { return parameters + gradients + optimizer + activations + working; }
};

struct PlannedSplit {
  Split split;         // with the first number of microbatches within 2% of the fastest of those that fit
  double seconds = 0;  // of a step: forward, backward, averaging and the optimizer; 0 where that was not measured
  SplitMemory memory;
  bool is_computed = false;  // costs of more ranks than measured are in it
  std::string refused = {};  // why it cannot be used; empty where it can
};

struct SplitPlan {
  // The fastest first; refused ones at the end.
  std::vector<PlannedSplit> candidates;

  // Throws InvalidArgument where none fits, naming the one that needs least.
  const PlannedSplit& best() const;

  // A line for each of the first candidates, for people.
  std::string table(std::size_t most = 20) const;
};

// Collective. Candidates are all products of three axes: data, with and without sharding; pipeline, with each schedule
// that the number of layers allows; and tensor. x, target [examples, ...]: a batch of all ranks. Layers keep examples
// first.
//
// Layers are made and measured one at a time, equal ones once: those of one type whose submodules, parameters,
// inputs and outputs have the same types and shapes. Options that change neither shapes nor types, such as a stride
// that leaves the output's shape as it is, are not compared. So a model that fits on no rank can be planned. Memory of
// activations is counted by Lockstep's allocator (ops/memory.h); 0 where LibTorch's own serves. The random generator is
// left as it was.
//
// Throws InvalidArgument, on all ranks, where there are no layers, for fewer ranks than measure or fewer than 1, and
// for a single rank that is to plan for more. Throws it for x and target with no examples or different numbers of them,
// and for x that is not in host memory. Throws it where no data axis divides the examples and nothing else is possible,
// for less than 1 microbatch, and for an entry of `tensor` that matches nothing. Throws as layers and the loss.
SplitPlan plan_parallel(const std::vector<PipelineStage>& layers, const Tensor& x, const Tensor& target,
                        const SplitLoss& loss, const Communicator& ranks, const PlanOptions& options = {});

}  // namespace lockstep
