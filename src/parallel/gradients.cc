#include "lockstep/parallel/gradients.h"

#include <ATen/ATen.h>

#include <span>

#include "base/text.h"
#include "gradient/layer_over_ranks.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "parallel/gradient_norm.h"
#include "parallel/known_shards.h"
#include "parallel/sum_gradients.h"

namespace lockstep {
namespace {

const Purpose kCounts("the examples of average_gradients"), kMeans("the gradients of average_gradients");

void check_equal(double examples_times_ranks, double total) {
  if (examples_times_ranks == total) return;
  throw InvalidArgument(
      "average_gradients: parameters are divided among ranks whose numbers of examples differ: their "
      "gradients are sums over all ranks already, so scale the losses by the examples instead");
}

// Batch normalizations over equally many ranks, whose last backward must have weighed these ranks as the mean does.
std::vector<std::shared_ptr<gradient::LayerOverRanks>> weighed_layers(const std::vector<Tensor>& parameters,
                                                                      const Communicator& ranks) {
  std::vector<std::shared_ptr<gradient::LayerOverRanks>> layers;
  for (const auto& parameter : parameters) {
    auto layer = gradient::layer_over_ranks_of(parameter);
    if (layer != nullptr && layer->group().size() == ranks.size() && layer->trains() && layer->counted())
      layers.push_back(std::move(layer));
  }
  return layers;
}

// Compares by the equality case of Cauchy's inequality, so that all ranks decide alike. A rank whose batch had no
// examples has no gradient to weigh.
void add_products(double examples, double counted, std::vector<double>& sums) {
  const double mine = counted > 0 ? examples : 0;
  sums.insert(sums.end(), {mine * mine, mine * counted, counted * counted});
}

void check_proportional(const gradient::LayerOverRanks& layer, double examples, std::span<const double> products) {
  constexpr double kRounding = 1e-9;
  const double square = products[1] * products[1], most = products[0] * products[2];
  if (most - square <= kRounding * most) return;
  throw InvalidArgument(
      text("average_gradients: the ranks count for other numbers than in the backward of the batch "
           "normalization \"",
           layer.name(), "\" over them: here this rank counts for ", examples, ", and there for ",
           layer.counted().value_or(0),
           ". Let each rank's loss be the mean over its examples, and give their number; or give "
           "a Pipeline's step the same weight on all ranks, and none here"));
}

}  // namespace

void average_gradients(const std::vector<Tensor>& parameters, const Communicator& ranks, double examples) {
  if (parallel::any_is_shard_of(parameters, ranks))
    throw InvalidArgument(
        "average_gradients: gradients of fully_shard's parameters are means over these ranks already");
  if (ranks.size() == 1) return;
  if (!(examples >= 0)) throw InvalidArgument(text("average_gradients: examples is ", examples));
  const at::NoGradGuard no_gradient;
  std::vector<Tensor> averaged;
  for (const auto& parameter : parallel::unique(parameters)) {
    if (parameter.requires_grad()) averaged.push_back(parameter);
  }
  // The examples, and how many ranks have each gradient.
  std::vector<double> counts{examples};
  for (const auto& parameter : averaged) counts.push_back(parameter.grad().defined() ? 1 : 0);
  const auto layers = weighed_layers(averaged, ranks);
  for (const auto& layer : layers) add_products(examples, layer->counted().value_or(0), counts);
  ranks.with_purpose(kCounts).sum(counts);
  const double total = counts[0];
  for (std::size_t i = 0; i < layers.size(); ++i)
    check_proportional(*layers[i], examples, std::span(counts).subspan(averaged.size() + 1 + 3 * i, 3));
  std::vector<std::pair<Tensor, Tensor>> sent;  // gradients, and where they lie in host memory
  std::vector<Call> calls;
  for (std::size_t i = 0; i < averaged.size(); ++i) {
    const auto& parameter = averaged[i];
    auto& gradient = parameter.mutable_grad();
    if (gradient.defined()) gradient = (gradient.is_sparse() ? gradient.to_dense() : gradient).contiguous();
    if (parallel::is_divided_among(parameter, ranks)) {
      check_equal(examples * ranks.size(), total);
      if (gradient.defined()) gradient.mul_(1.0 / ranks.size());
      continue;
    }
    if (counts[i + 1] == 0) continue;
    if (!gradient.defined()) gradient = at::zeros_like(parameter, at::MemoryFormat::Contiguous);
    if (examples == 0) {
      gradient.zero_();  // the mean over no examples is no number
    } else {
      gradient.mul_(examples / total);
    }
    sent.emplace_back(gradient, gradient.cpu());
    calls.push_back(Call::all_reduce(buffer_of(sent.back().second), ReduceOp::sum));
    calls.back().purpose = kMeans;
  }
  ranks.group().run(calls, ranks.deadline());
  for (const auto& [gradient, host] : sent) {
    if (!gradient.is_cpu()) gradient.copy_(host);
  }
}

double clip_grad_norm(const std::vector<Tensor>& parameters, double max_norm, const Communicator& stages) {
  parallel::check_max_norm(max_norm);
  if (parallel::any_is_shard(parameters))
    throw InvalidArgument("clip_grad_norm: use FullyShardedParameters::clip_grad_norm for its parameters");
  const at::NoGradGuard no_gradient;
  parallel::GradientNorm squares;
  const auto unique = parallel::unique(parameters);
  for (const auto& parameter : unique) squares.add(parameter, parameter.grad());
  const auto norm = squares.over({}, stages);
  const auto factor = parallel::clip_factor(norm, max_norm);
  for (const auto& parameter : unique) {
    if (factor != 1 && parameter.grad().defined()) parameter.mutable_grad().mul_(factor);
  }
  return norm;
}

}  // namespace lockstep
