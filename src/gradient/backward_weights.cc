// Weights of backwards: each one's gradients are multiplied by its weight before they are added to those of earlier
// ones.
#include <ATen/ops/any.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "gradient/gradient_reducer.h"

namespace lockstep::gradient {

// Called for each gradient of a backward before it is added to what has accumulated.
at::Tensor GradientReducer::weighed(std::size_t parameter, const at::Tensor& gradient) {
  if (!accumulates(parameter)) return gradient;
  if (const int backward = torch::autograd::get_current_graph_task_id(); backward != backward_) {
    backward_ = backward;
    begin_backward();
  }
  const double scale = weight_ / accumulated_.unit;
  if (scale == 1) return gradient;
  return scale == 0 ? at::zeros_like(gradient) : gradient * scale;
}

// Whether this backward adds to the parameter's gradient: torch::autograd::grad does not.
bool GradientReducer::accumulates(std::size_t parameter) const {
  const auto* const asked = torch::autograd::get_current_graph_task_exec_info();
  if (asked == nullptr || asked->empty()) return true;
  const auto found = asked->find(torch::autograd::impl::grad_accumulator(parameters_[parameter]).get());
  return found != asked->end() && found->second.needed_;
}

void GradientReducer::begin_backward() {
  weight_ = std::exchange(coming_weight_, std::nullopt).value_or(weight_);
  // Starts anew where zero_grad has cleared the gradients; it may leave zeros.
  const auto is_left = [](const at::Tensor& parameter) {
    return parameter.grad().defined() &&
           at::any(parameter.grad().is_sparse() ? parameter.grad().to_dense() : parameter.grad()).item<bool>();
  };
  if (accumulated_.backwards > 0 && std::none_of(parameters_.begin(), parameters_.end(), is_left)) accumulated_ = {};
  if (accumulated_.backwards++ == 0) accumulated_.unit = weight_ > 0 ? weight_ : 1;
  accumulated_.weight += weight_;
}

}  // namespace lockstep::gradient
