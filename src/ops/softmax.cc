#include "kernels/matrix.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/ops/ops.h"
#include "ops/fast.h"

namespace lockstep::ops {
namespace {

Tensor plain(const Tensor& logits, const Tensor& labels) {
  const auto rows = at::log_softmax(logits, -1).reshape({-1, logits.size(-1)});
  return at::nll_loss(rows, labels.reshape({-1}), {}, at::Reduction::None).reshape(labels.sizes());
}

// Labels outside the classes go to LibTorch too, which throws its own error.
bool covered(const Tensor& logits, const Tensor& labels) {
  if (!fast_fusion() || !fast(logits) || logits.dim() < 1 || !labels.device().is_cpu()) return false;
  if (labels.scalar_type() != at::kLong || labels.sizes() != logits.sizes().slice(0, logits.dim() - 1)) return false;
  const auto contiguous = labels.contiguous();
  const auto* label = contiguous.const_data_ptr<std::int64_t>();
  return std::all_of(label, label + labels.numel(), [&](auto l) { return l >= 0 && l < logits.size(-1); });
}

struct SoftmaxCrossEntropy : torch::autograd::Function<SoftmaxCrossEntropy> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& logits, const Tensor& labels) {
    const auto rows = logits.contiguous();
    const auto label = labels.contiguous();
    auto loss = at::empty(labels.sizes(), logits.options());
    auto probability = at::empty_like(rows);
    kernels::dense_kernels().cross_entropy(rows.const_data_ptr<float>(), label.const_data_ptr<std::int64_t>(),
                                           label.numel(), rows.size(-1), loss.mutable_data_ptr<float>(),
                                           probability.mutable_data_ptr<float>());
    context->save_for_backward({logits, label, probability});
    return loss;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto &logits = saved[0], &label = saved[1];
    if (at::GradMode::is_enabled()) {
      const auto again =
          double_backward([&](const auto& inputs) { return plain(inputs[0], label); }, {logits}, gradients[0]);
      return {again[0], Tensor()};
    }
    const auto& probability = saved[2];
    // The gradient of a sum is one number expanded to all rows: it is read without a copy.
    const auto strides = gradients[0].strides();
    const bool one_for_all = std::all_of(strides.begin(), strides.end(), [](auto stride) { return stride == 0; });
    const auto gradient = one_for_all ? resolved(gradients[0]) : resolved(gradients[0]).contiguous();
    auto result = at::empty_like(probability);
    kernels::dense_kernels().cross_entropy_backward(
        gradient.const_data_ptr<float>(), one_for_all ? 0 : 1, probability.const_data_ptr<float>(),
        label.const_data_ptr<std::int64_t>(), label.numel(), probability.size(-1), result.mutable_data_ptr<float>());
    return {result, Tensor()};
  }
};

}  // namespace

Tensor softmax_cross_entropy(const Tensor& logits, const Tensor& labels) {
  return covered(logits, labels) ? SoftmaxCrossEntropy::apply(logits, labels) : plain(logits, labels);
}

}  // namespace lockstep::ops
