// For tests: fits of a transformer on meshes whose ranks are threads of one process, in double precision.
#pragma once

#include <ATen/detail/CUDAHooksInterface.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <lockstep/parallel.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "collective/on_ranks_testing.h"
#include "gradient/replicated_parameters.h"
#include "parallel/transformer_testing.h"
#include "strategy/unwrap.h"

namespace lockstep {

inline const parallel::TransformerOptions kTransformer{.layers = 2, .tied = true};

// Steps of a fit: two passes over the batches, and ragged ones among them. An error in a sum shows in the first step.
constexpr int kSteps = 12;
constexpr double kTolerance = 1e-9;

// The transformer's blocks, one unit each.
inline const FullyShardOptions kUnits{.units = {"1", "2"}};

// All trainings begin with these: a strategy gives the functions that make modules random numbers of its own.
inline const parallel::Parameters& initial_values() {
  static const auto net = parallel::make_transformer(kTransformer);
  static const auto values = parallel::parameters_of(*net);
  return values;
}

// Batches of 7 of 26 sequences: the last has 5.
inline Dataset make_sequences() {
  initial_values();
  const auto [ids, labels] = parallel::make_batch(0, 26, kTransformer);
  return Dataset::from_tensor_slices(ids, labels).batch(7);
}

inline ParallelPlan transformer_plan() {
  return {{"0.token", RowwiseParallel()}, {"*.qkv", ColwiseParallel()},
          {"*.out", RowwiseParallel()},   {"*.up", ColwiseParallel()},
          {"*.down", RowwiseParallel()},  {"3.head", ColwiseParallel{.output = Replicate()}}};
}

inline parallel::Transformer make_some_frozen() {
  auto net = parallel::make_transformer(kTransformer);
  for (const auto& each : net->named_parameters()) {
    each.value().set_data(initial_values().at(each.key()).detach().clone());
    if (each.key() == "1.norm1.weight" || each.key() == "2.up.weight") each.value().set_requires_grad(false);
  }
  return net;
}

// A layer in double precision, with the values and frozen parameters that the whole transformer has.
template <class Layer, class... More>
PipelineStage make_layer(int number, const More&... more) {
  return [number, more...] {
    auto layer = std::make_shared<Layer>(kTransformer, more...);
    layer->to(at::kDouble);
    const auto whole = make_some_frozen();
    for (const auto& each : layer->named_parameters()) {
      const auto name = std::to_string(number) + "." + each.key();
      each.value().set_data(initial_values().at(name).detach().clone());
      each.value().set_requires_grad(parallel::parameters_of(*whole).at(name).requires_grad());
    }
    return layer;
  };
}

inline std::vector<PipelineStage> transformer_layers() {
  return {make_layer<parallel::FrontImpl>(0), make_layer<parallel::BlockImpl>(1), make_layer<parallel::BlockImpl>(2),
          make_layer<parallel::BackImpl>(3, at::Tensor())};
}

// Made for the strategy in scope; of layers, where it is to be cut into stages.
inline Model make_transformer_model(const Optimizer& optimizer, bool of_layers = false) {
  auto model = of_layers ? Model(transformer_layers()) : Model(make_some_frozen);
  model.compile({.optimizer = optimizer,
                 .loss = SparseCategoricalCrossentropy({.from_logits = true}),
                 .metrics = {"sparse_categorical_accuracy"}});
  return model;
}

// The results of a training on one rank.
struct Trained {
  parallel::Parameters weights;  // whole
  std::map<std::string, std::vector<double>> history;
  Tensor predicted;
};

// Returns whole weights on all ranks, in host memory. Collective.
inline parallel::Parameters whole_weights(const ReplicatedModule& module) {
  parallel::Parameters weights;
  const auto& parameters = unwrap(module);
  for (std::size_t i = 0; i < parameters.slots().size(); ++i) {
    weights[parameters.slots()[i].name] =
        parameters.whole(i, parameters.parameter(0, i)).detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
  }
  return weights;
}

inline parallel::Parameters whole_weights(const Model& model) { return whole_weights(model.module()); }

using Axes = std::vector<DeviceMesh::Axis>;

inline std::string name_of(const Axes& axes) {
  std::string name;
  for (const auto& axis : axes) name += axis.name + std::to_string(axis.size);
  return name;
}

// Runs body(strategy) on each rank of a mesh, each on a GPU where there are as many.
inline void on_mesh(const Axes& axes, ModelParallelOptions options,
                    const std::function<void(const ModelParallelStrategy&)>& body) {
  int ranks = 1;
  bool divides = false;
  for (const auto& axis : axes) {
    ranks *= axis.size;
    divides |= axis.name == options.tensor_axis;
  }
  if (!divides) options.plan.clear();
  options.threads_per_replica = 1;
  const bool has_gpus = at::detail::getCUDAHooks().deviceCount() >= ranks;
  collective::on_ranks(ranks, [&](const Group& group) {
    const DeviceMesh mesh(axes, Communicator(group, 60));
    auto own = options;
    own.device = (has_gpus ? "cuda:" : "cpu:") + std::to_string(has_gpus ? group.rank() : 0);
    const ModelParallelStrategy strategy(mesh, own);
    const auto scope = strategy.scope();
    body(strategy);
  });
}

}  // namespace lockstep
