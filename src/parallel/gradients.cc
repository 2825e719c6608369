#include "lockstep/parallel/gradients.h"

#include <ATen/ATen.h>

#include "base/text.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "parallel/gradient_norm.h"
#include "parallel/sharded_units.h"
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
  ranks.with_purpose(kCounts).sum(counts);
  const double total = counts[0];
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
