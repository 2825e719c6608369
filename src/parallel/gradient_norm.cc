#include "parallel/gradient_norm.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "base/text.h"
#include "parallel/divided_parameter.h"
#include "parallel/tied_parameters.h"

namespace lockstep::parallel {

void GradientNorm::add(const Tensor& parameter, const Tensor& gradient) {
  if (is_tied_copy(parameter)) return;
  auto* parts = parts_.data();
  if (const auto partial = partial_of(parameter)) {
    const auto* const backend = partial->ranks().group().shared_backend().get();
    const auto found = std::find_if(parts_.begin() + 1, parts_.end(), [&](const auto& each) {
      return each.ranks.group().shared_backend().get() == backend;
    });
    parts = found != parts_.end() ? &*found : &parts_.emplace_back(Parts{partial->ranks()});
  }
  if (!gradient.defined()) return;
  const auto norm = gradient.norm(2, at::kDouble).item<double>();
  parts->squares += norm * norm;
}

double GradientNorm::over(const Communicator& shards, const Communicator& stages) const {
  std::vector<double> squares;
  for (const auto& parts : parts_) squares.push_back(parts.squares);
  shards.sum(squares);
  double sum = 0;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    parts_[i].ranks.sum({&squares[i], 1});
    sum += squares[i];
  }
  stages.sum({&sum, 1});
  return std::sqrt(sum);
}

std::vector<Tensor> unique(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> each;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& parameter : parameters) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) each.push_back(parameter);
  }
  return each;
}

double clip_factor(double norm, double max_norm) {
  const auto factor = max_norm / (norm + 1e-6);  // as torch.nn.utils.clip_grad_norm_
  return factor > 1 ? 1 : factor;                // a norm that is no number stays one
}

void check_max_norm(double max_norm) {
  if (!(max_norm > 0)) throw InvalidArgument(text("clip_grad_norm: max_norm is ", max_norm, "; it must be above 0"));
}

}  // namespace lockstep::parallel
