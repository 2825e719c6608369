#include "lockstep/parallel/cut_stages.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "base/text.h"
#include "ops/replica_random.h"
#include "parallel/exchange.h"
#include "parallel/layer_measurements.h"
#include "parallel/pipeline_run.h"
#include "parallel/sharded_units.h"
#include "train/layers/stack.h"

namespace lockstep {
namespace {

constexpr int kRuns = 4;  // the first is slower

// `x` becomes the layer's output.
LayerCost measure(const PipelineStage& layer, Tensor& x) {
  const auto module = layer.make();
  module->to(x.device());
  if (parallel::is_called_with_other_ranks(*module)) {
    throw InvalidArgument(
        "measure_layers: a layer has experts on several ranks, a batch normalization over them, or sharded parameters, "
        "which all ranks would have to call: say how many layers each stage has, as "
        "ModelParallelOptions::layers_of_stages does");
  }
  LayerCost cost{.seconds = std::numeric_limits<double>::infinity()};
  for (const auto& parameter : module->parameters()) cost.parameter_bytes += static_cast<double>(parameter.nbytes());
  Tensor output;
  for (int i = 0; i < kRuns; ++i) {
    const auto input = x.is_floating_point() ? x.detach().requires_grad_() : x;
    const auto start = std::chrono::steady_clock::now();
    const auto before = parallel::bytes_in_use();
    const auto y = layer.forward(*module, input);
    cost.activation_bytes = std::max(cost.activation_bytes, parallel::bytes_in_use() - before);
    if (y.requires_grad()) y.backward(at::ones_like(y));
    parallel::synchronize(x.device());
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    cost.seconds = std::min(cost.seconds, seconds.count());
    output = y.detach();
  }
  x = output;
  return cost;
}

// The least cost of the slowest stage for layers up to `end` in `stages` stages, and the first layer of the last stage.
struct Best {
  double seconds = std::numeric_limits<double>::infinity();
  std::size_t begin = 0;
};

// A stage's seconds; infinite where it needs more than the bound.
double cost_of(const std::vector<LayerCost>& layers, std::size_t begin, std::size_t end, int microbatches,
               const CutOptions& options) {
  LayerCost sum;
  for (std::size_t i = begin; i < end; ++i) {
    sum.seconds += layers[i].seconds;
    sum.parameter_bytes += layers[i].parameter_bytes;
    sum.activation_bytes += layers[i].activation_bytes;
  }
  const bool fits =
      options.parameter_copies * sum.parameter_bytes + microbatches * sum.activation_bytes <= options.most_bytes;
  return fits ? sum.seconds : std::numeric_limits<double>::infinity();
}

}  // namespace

std::vector<LayerCost> measure_layers(const std::vector<PipelineStage>& layers, const Tensor& x,
                                      const Communicator& ranks) {
  std::vector<LayerCost> costs(layers.size());
  ranks.run_on_rank_0([&] {
    auto generator = ops::generator_of_thread();
    const auto random = generator.get_state();
    auto input = x;
    for (std::size_t i = 0; i < layers.size(); ++i) costs[i] = measure(layers[i], input);
    generator.set_state(random);
  });
  parallel::broadcast_values(costs, ranks);
  return costs;
}

std::vector<int> cut_stages(const std::vector<LayerCost>& layers, int stages, const CutOptions& options) {
  const auto count = layers.size();
  if (stages < 1 || count < static_cast<std::size_t>(stages))
    throw InvalidArgument(text("cut_stages: ", count, " layers for ", stages, " stages; there must be one for each"));
  std::vector<std::vector<Best>> best(static_cast<std::size_t>(stages) + 1, std::vector<Best>(count + 1));
  best[0][0].seconds = 0;
  for (std::size_t stage = 1; stage < best.size(); ++stage) {
    const int microbatches = stages - static_cast<int>(stage) + 1;
    for (std::size_t end = stage; end <= count; ++end) {
      for (std::size_t begin = stage - 1; begin < end; ++begin) {
        const auto seconds =
            std::max(best[stage - 1][begin].seconds, cost_of(layers, begin, end, microbatches, options));
        if (seconds < best[stage][end].seconds) best[stage][end] = {seconds, begin};
      }
    }
  }
  if (best.back()[count].seconds == std::numeric_limits<double>::infinity()) {
    throw InvalidArgument(text("cut_stages: no cut into ", stages, " stages keeps each below ",
                               options.most_bytes / (1 << 20), " MiB; use more stages, or split layers"));
  }
  std::vector<int> result(static_cast<std::size_t>(stages));
  for (std::size_t stage = result.size(), end = count; stage > 0; --stage) {
    const auto begin = best[stage][end].begin;
    result[stage - 1] = static_cast<int>(end - begin);
    end = begin;
  }
  return result;
}

std::vector<PipelineStage> join_layers(const std::vector<PipelineStage>& layers,
                                       const std::vector<int>& layers_of_stages) {
  const auto sum = std::accumulate(layers_of_stages.begin(), layers_of_stages.end(), 0);
  const bool all_positive = std::ranges::all_of(layers_of_stages, [](int n) { return n > 0; });
  if (sum != static_cast<int>(layers.size()) || !all_positive) {
    throw InvalidArgument(text("join_layers: stages of ", join(layers_of_stages), " layers, of ", layers.size(),
                               " layers; each must have one, and together they must have all"));
  }
  std::vector<PipelineStage> stages;
  std::size_t first = 0;
  for (const int count : layers_of_stages) {
    stages.emplace_back([layers, first, count] {
      return std::make_shared<train::LayersModule>(layers, first, static_cast<std::size_t>(count));
    });
    first += static_cast<std::size_t>(count);
  }
  return stages;
}

}  // namespace lockstep
