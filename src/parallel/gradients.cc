#include "lockstep/parallel/gradients.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "parallel/divided_parameter.h"
#include "parallel/tied_parameters.h"

namespace lockstep {
namespace {

double sum_of_squares(const Tensor& gradient) {
  const auto norm = gradient.norm(2, at::kDouble).item<double>();
  return norm * norm;
}

// Of parameters whose other parts `ranks` have.
struct Parts {
  Communicator ranks;
  double sum = 0;
};

Parts& parts_of(const Communicator& ranks, std::vector<Parts>& all) {
  const auto* const backend = ranks.group().shared_backend().get();
  const auto found = std::find_if(
      all.begin(), all.end(), [&](const auto& each) { return each.ranks.group().shared_backend().get() == backend; });
  return found != all.end() ? *found : all.emplace_back(Parts{ranks});
}

}  // namespace

void average_gradients(const std::vector<Tensor>& parameters, const Communicator& ranks, double examples) {
  if (ranks.size() == 1) return;
  if (!(examples >= 0)) throw InvalidArgument(text("average_gradients: examples is ", examples));
  double total = examples;
  ranks.sum({&total, 1});
  const at::NoGradGuard no_gradient;
  std::vector<Tensor> sent;
  std::vector<Call> calls;
  for (const auto& parameter : parameters) {
    if (!parameter.requires_grad()) continue;
    auto& gradient = parameter.mutable_grad();
    gradient = gradient.defined() ? gradient.contiguous() : at::zeros_like(parameter, at::MemoryFormat::Contiguous);
    gradient.mul_(total > 0 ? examples / total : 0);
    sent.push_back(gradient.cpu());
    calls.push_back(Call::all_reduce(buffer_of(sent.back()), ReduceOp::sum));
  }
  ranks.group().run(calls, ranks.deadline());
  std::size_t i = 0;
  for (const auto& parameter : parameters) {
    if (!parameter.requires_grad()) continue;
    if (!parameter.is_cpu()) parameter.mutable_grad().copy_(sent[i]);
    ++i;
  }
}

double clip_grad_norm(const std::vector<Tensor>& parameters, double max_norm, const Communicator& stages) {
  if (!(max_norm > 0)) throw InvalidArgument(text("clip_grad_norm: max_norm is ", max_norm, "; it must be above 0"));
  const at::NoGradGuard no_gradient;
  double sum = 0;
  std::vector<Parts> of_parts;  // in the order in which all ranks find them
  for (const auto& parameter : parameters) {
    if (!parameter.grad().defined() || parallel::is_tied_copy(parameter)) continue;
    const auto division = parallel::division_of(parameter);
    auto& into = division == nullptr ? sum : parts_of(division->ranks(), of_parts).sum;
    into += sum_of_squares(parameter.grad());
  }
  for (auto& parts : of_parts) {
    parts.ranks.sum({&parts.sum, 1});
    sum += parts.sum;
  }
  stages.sum({&sum, 1});
  const auto norm = std::sqrt(sum);
  const auto factor = max_norm / (norm + 1e-6);  // as PyTorch's
  if (factor < 1) {
    for (const auto& parameter : parameters) {
      if (parameter.grad().defined()) parameter.mutable_grad().mul_(factor);
    }
  }
  return norm;
}

}  // namespace lockstep
