#include "lockstep/parallel/gradients.h"

#include <ATen/ATen.h>

#include "base/text.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "parallel/gradient_norm.h"

namespace lockstep {
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
  parallel::check_max_norm(max_norm);
  const at::NoGradGuard no_gradient;
  parallel::GradientNorm squares;
  for (const auto& parameter : parameters) squares.add(parameter, parameter.grad());
  const auto norm = squares.over({}, stages);
  const auto factor = parallel::clip_factor(norm, max_norm);
  for (const auto& parameter : parameters) {
    if (factor != 1 && parameter.grad().defined()) parameter.mutable_grad().mul_(factor);
  }
  return norm;
}

}  // namespace lockstep
