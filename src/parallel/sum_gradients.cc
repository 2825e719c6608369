#include "parallel/sum_gradients.h"

#include <ATen/ATen.h>

#include <utility>

#include "lockstep/gradient/tensor_collectives.h"
#include "parallel/divided_parameter.h"
#include "parallel/gradient_norm.h"
#include "parallel/known_shards.h"

namespace lockstep::parallel {
namespace {

const Purpose kThere("finding which gradients the ranks have"), kSums("the gradients that the ranks share");

}  // namespace

bool is_divided_among(const Tensor& parameter, const Communicator& ranks) {
  const auto own = partial_of(parameter), partial = own != nullptr ? own : partial_of_shard(parameter);
  return partial != nullptr && partial->ranks().group().shared_backend() == ranks.group().shared_backend();
}

void sum_gradients(const std::vector<Tensor>& parameters, const Communicator& ranks) {
  if (ranks.size() == 1) return;
  const at::NoGradGuard no_gradient;
  std::vector<Tensor> shared;
  std::vector<double> there;
  for (const auto& parameter : unique(parameters)) {
    if (!parameter.requires_grad() || is_divided_among(parameter, ranks)) continue;
    shared.push_back(parameter);
    there.push_back(parameter.grad().defined() ? 1 : 0);
  }
  ranks.with_purpose(kThere).sum(there);
  std::vector<std::pair<Tensor, Tensor>> sent;  // gradients, and where they lie in host memory
  std::vector<Call> calls;
  for (std::size_t i = 0; i < shared.size(); ++i) {
    if (there[i] == 0) continue;
    auto& gradient = shared[i].mutable_grad();
    if (gradient.defined() && gradient.is_sparse()) gradient = gradient.to_dense();
    gradient = gradient.defined() ? gradient.contiguous() : at::zeros_like(shared[i], at::MemoryFormat::Contiguous);
    sent.emplace_back(gradient, gradient.cpu());
    calls.push_back(Call::all_reduce(buffer_of(sent.back().second), ReduceOp::sum));
    calls.back().purpose = kSums;
  }
  ranks.group().run(calls, ranks.deadline());
  for (const auto& [gradient, host] : sent) {
    if (!gradient.is_cpu()) gradient.copy_(host);
  }
}

}  // namespace lockstep::parallel
