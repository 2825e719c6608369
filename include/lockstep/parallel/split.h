// Split: one way to lay a model and its batches over ranks, and SplitModel, which trains a model by it.
//
//   const auto plan = lockstep::plan_parallel(layers, x, y, loss, ranks, options);  // plan.h, or a Split of your own
//   const auto& split = plan.best().split;
//   lockstep::DeviceMesh mesh(split.axes());
//   lockstep::SplitModel model(layers, split, mesh, options.tensor);
//   torch::optim::AdamW adamw(model.parameters());
//
//   adamw.zero_grad();
//   model.step(x, y, loss);
//   adamw.step();
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/ops/tensor.h"
#include "lockstep/parallel/device_mesh.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/pipeline.h"
#include "lockstep/parallel/tensor_parallel.h"

namespace lockstep {

// The things that ranks of the data axis divide among them besides the batch.
enum class Sharding : std::uint8_t {
  none,        // nothing: each has all parameters, and gradients are averaged
  gradients,   // fully_shard with reshard_after_forward = false: ZeRO stage 2
  parameters,  // fully_shard: ZeRO stage 3
};

struct Split {
  int data = 1, pipeline = 1, tensor = 1;  // sizes of the mesh's axes
  Sharding sharding = Sharding::none;

  MakePipelineSchedule schedule = schedules::one_forward_one_backward;
  std::string schedule_name = "1f1b";  // for tables
  int microbatches = 1;
  std::vector<int> layers_of_stages = {};  // [stage]: how many; empty: all layers are one stage

  // data, pipeline, tensor: for DeviceMesh.
  std::vector<DeviceMesh::Axis> axes() const;

  // "data 2, pipeline 2, 1f1b, 4 microbatches".
  std::string describe() const;
};

// The mean loss over the examples of a microbatch: a scalar. `tensor`: the ranks of the tensor axis, for
// vocabulary_parallel_cross_entropy where the output is divided.
using SplitLoss = std::function<Tensor(const Tensor& output, const Tensor& target, const Communicator& tensor)>;

// A model of layers, each on the ranks that the split gives it to. Trains as the unsplit model does: Pipeline,
// parallelize_module, FullyShardedParameters and average_gradients, put together.
//
// One thread a rank; all ranks make the same calls.
class SplitModel {
 public:
  // Collective over the mesh, which has the axes of the split. `layers`: as measure_layers; layer i's parameters are
  // called "i.name", also in `tensor`, of which each stage takes the entries that match something in it. Initial
  // values are those of the unsplit model with the same seed. Throws as Pipeline, parallelize_module and
  // FullyShardedParameters do, and InvalidArgument where the mesh's sizes are not the split's and for an entry that
  // matches nothing in any layer.
  SplitModel(const std::vector<PipelineStage>& layers, const Split& split, const DeviceMesh& mesh,
             const ParallelPlan& tensor = {});
  ~SplitModel();

  // Forward and backward of a batch that all ranks have: each computes its part of it. Adds the gradient of the mean
  // loss over all examples to this rank's parameters, and returns that loss, on all ranks. x, target: [examples, ...].
  // Throws InvalidArgument where the data axis does not divide the number of examples, and for labels that a mean
  // leaves out, as Pipeline::step. Throws what a layer or the loss throws: the calls of all ranks of the mesh end then.
  double step(const Tensor& x, const Tensor& target, const SplitLoss& loss);

  // A step for the loss that is `sum` over the batch, divided by `weight` of the batch's target. Both are functions as
  // in Pipeline::step; throws as above.
  double step(const Tensor& x, const Tensor& target, const SplitLoss& sum, const PipelineWeight& weight);

  // Collective. Scales the gradients so that their norm over the whole model is at most `max_norm`, and returns what it
  // was. Follows torch.nn.utils.clip_grad_norm_.
  double clip_grad_norm(double max_norm);

  // This rank's: what optimizers get.
  const std::vector<Tensor>& parameters() const;

  // This rank's modules, for evaluation and timelines, and for saving where the split does not shard: else their
  // parameters have no values of their own.
  Pipeline& pipeline();

  // The shards of this rank's stages, for saving and loading: gather and load are collective over the data axis;
  // layer i's parameters are called "i.name". Null where the split does not shard.
  FullyShardedParameters* sharded();

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace lockstep
