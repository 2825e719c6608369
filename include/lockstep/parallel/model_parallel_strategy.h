// ModelParallelStrategy: fit, and loops of your own, on a DeviceMesh. Follows keras.distribution.ModelParallel and
// Lightning's ModelParallelStrategy.
//
//   lockstep::DeviceMesh mesh({{"data", 2}, {"tensor", 2}});  // of the 4 processes of this job
//   lockstep::ModelParallelStrategy strategy(mesh, {.plan = {{"up", lockstep::ColwiseParallel()},
//                                                            {"down", lockstep::RowwiseParallel()}}});
//   const auto scope = strategy.scope();
//   lockstep::Model model([] { return Net(); });
//   model.compile({.optimizer = "adam", .loss = "mse"});
//   model.fit(data);
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/parallel/device_mesh.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/pipeline.h"
#include "lockstep/parallel/split.h"
#include "lockstep/parallel/tensor_parallel.h"
#include "lockstep/strategy/multi_worker_mirrored_strategy.h"
#include "lockstep/strategy/strategy.h"

namespace lockstep {

// By patterns of parameters' names, as in a ParallelPlan: for each dimension of the parameter the axis of the mesh
// along which it is divided, or "" for none. For weights [outputs, inputs] of linear layers, whose biases go with them,
// and of embeddings [ids, features]. Activations are whole between layers, so each divided layer communicates; a plan
// says where they are not. Follows keras.distribution.LayoutMap.
using LayoutMap = std::vector<std::pair<std::string, std::vector<std::string>>>;

struct ModelParallelOptions {
  // The axis along which ranks have the same parts of a model and train on other examples: keras.distribution's
  // batch_dim_name. Where the mesh has neither this axis nor shard_axis, all ranks have the same examples.
  std::string batch_axis = "data";

  // How models are divided along the axis `tensor_axis`: as parallelize_module.
  std::string tensor_axis = "tensor";
  ParallelPlan plan = {};
  LayoutMap layout_map = {};  // the same in Keras's words; only one of the two

  // An axis along which ranks train on other examples too, as fully_shard. Each rank has a part of all parameters,
  // their gradients and the optimizer's state. The ranks along batch_axis are fully_shard's `replicas`.
  std::string shard_axis = "shard";
  FullyShardOptions fully_shard = {};

  // An axis along which ranks have other layers: as Pipeline, for a Model that is made of layers, or a Sequential. Each
  // rank has `stages_per_rank` stages of so many layers each as layers_of_stages says; empty: as cut_stages says after
  // measure_layers. `tied`: names of parameters that are one in the unsplit model, such as {"0.token.weight",
  // "5.head.weight"} of the layers 0 and 5; a checkpoint has each of them. Not together with shard_axis, nor are
  // schedules that split backward.
  std::string pipeline_axis = "pipeline";
  MakePipelineSchedule schedule = schedules::one_forward_one_backward;
  int microbatches = 4;
  int stages_per_rank = 1;
  std::vector<int> layers_of_stages = {};
  std::vector<std::vector<std::string>> tied = {};
  bool recompute = false;

  // An axis along which ranks have the same examples, and each a part of every sequence: as ContextParallel. Dimension
  // `context_dim` of x and y (and of sample weights that have it) is positions, where dimension 0 is examples.
  // Positions must divide evenly; predict returns all of them. Losses and metrics must be means, of a value for each
  // position or of means over positions. `context_plan`: parameters that belong to positions, such as {{"place.weight",
  // Shard{0}}}, with a row for each position of a sequence. A module that counts positions itself must begin after
  // those of the ranks before.
  std::string context_axis = "context";
  int context_dim = 1;
  ParallelPlan context_plan = {};

  // An axis along which ranks train on other examples, and have other experts of the MoE layers, which are made with
  // mesh[expert_axis]. Not together with shard_axis, nor is context_plan.
  std::string expert_axis = "expert";

  // Along batch_axis, where there is no shard_axis: as MultiWorkerMirroredOptions and CommunicationOptions.
  bool shard_optimizer_state = false;
  std::optional<double> bucket_cap_mb = {};
  std::optional<DType> gradient_dtype = {};
  std::int64_t compare_copies_every = 100;

  // A row is the ranks with one coordinate on batch_axis: they have one copy of the model together, and leave and come
  // together. When ranks are lost or get SIGTERM, fit and ElasticLoop go on with the rows that remain, and take in new
  // rows. For a mesh that was made with {.elastic = true}, whose first axis is batch_axis. elastic.min_workers counts
  // rows; worker_batch must be empty, and lost_host_seconds is that of the mesh's GroupOptions. Give layers_of_stages
  // where there are stages.
  std::optional<ElasticOptions> elastic = {};

  std::string device = {};      // of this process: "cpu:0", "cuda:0"; empty: a GPU where there are any
  int threads_per_replica = 0;  // as MirroredOptions
};

// Models that are made in its scope are split over the mesh: each rank has its parts of the parameters, of their
// gradients and of the optimizer's state. All ranks run the same program, make the same calls in the same order
// (evaluate, predict and saving too), and read the same data. A global batch is divided along batch_axis and
// shard_axis. The updates are those of one process with whole models and the whole batch, but for rounding; so are
// losses, metrics, clipping by norms and loss scales. Rank 0 of the mesh is the chief.
//
// Checkpoints are whole: saved on one mesh, they can be loaded on any other, and by any other strategy. The chief has
// all tensors in memory while it saves, and every rank while it loads.
//
// A rank without examples in a step computes with zeros where there is a shard_axis or pipeline_axis, and with none on
// an expert_axis. So each rank needs some of the first batch; in loops of your own call the module on all ranks.
//
// Every hundredth step compares the copies that several ranks have (compare_copies_every). Where copies differ,
// InvalidArgument names a parameter: a layer's style is missing in the plan, or a processor is broken.
//
// A rank that is lost ends the training on all others with PeerLost, which names its coordinates, unless the options
// have `elastic`. Then only the ranks of its row end, with ClusterError. The other rows have the same values and state,
// or, with shard_optimizer_state, a copy of what the lost ranks had alone. They divide the batches anew from the next
// step on, as workers of an elastic MultiWorkerMirroredStrategy. Rows that have lost different parts are put together.
class ModelParallelStrategy : public Strategy {
 public:
  // Collective over the mesh. Throws InvalidArgument for an axis of the mesh that is larger than 1 and not named by the
  // options, and for an option out of its range. Throws it also where a tensor axis has neither plan nor layout_map, or
  // a plan has no such axis. Options that do not fit a model are refused when the model is made.
  explicit ModelParallelStrategy(DeviceMesh mesh, ModelParallelOptions options = {});

  const DeviceMesh& mesh() const { return mesh_; }

 private:
  DeviceMesh mesh_;
};

// For a mesh with the axes of a split, such as plan_parallel's best one, and its PlanOptions::tensor.
ModelParallelOptions options_of(const Split& split, const ParallelPlan& tensor = {});

}  // namespace lockstep
