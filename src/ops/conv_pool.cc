#include "kernels/pooling.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/ops/ops.h"
#include "ops/fast.h"

namespace lockstep::ops {
namespace {

using kernels::ConvPool;

constexpr std::int64_t kMostTaps = 64;  // beyond, LibTorch's convolution reads each input often enough to be as fast

Tensor plain(const Tensor& x, const Tensor& weight, const Tensor& bias, at::IntArrayRef padding) {
  return at::max_pool2d(at::relu(at::conv2d(x, weight, bias, /*stride=*/1, padding)), 2);
}

bool covered(const Tensor& x, const Tensor& weight, const Tensor& bias, at::IntArrayRef padding) {
  if (!fast_fusion() || !fast(x) || !fast(weight) || (bias.defined() && !fast(bias))) return false;
  if (x.dim() != 4 || weight.dim() != 4 || x.size(1) != weight.size(1) || x.requires_grad()) return false;
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != weight.size(0))) return false;
  if (padding.empty() || padding.size() > 2 || padding.front() < 0 || padding.back() < 0) return false;
  return weight.numel() / weight.size(0) <= kMostTaps && x.size(2) + 2 * padding.front() > weight.size(2) &&
         x.size(3) + 2 * padding.back() > weight.size(3);
}

ConvPool shape_of(const Tensor& padded, const Tensor& weight) {
  return {padded.size(1), padded.size(2), padded.size(3), weight.size(0), weight.size(2), weight.size(3)};
}

// Splits images over this replica's threads: call(thread, first, count).
template <class Call>
void for_parts(std::int64_t images, std::int64_t parts, const Call& call) {
  at::parallel_for(0, parts, 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto part = begin; part < end; ++part) {
      const auto first = images * part / parts;
      call(part, first, static_cast<std::size_t>(images * (part + 1) / parts - first));
    }
  });
}
std::int64_t parts_of(std::int64_t images) { return std::min<std::int64_t>(images, at::get_num_threads()); }

struct ConvPoolFunction : torch::autograd::Function<ConvPoolFunction> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& weight,
                        const Tensor& bias, at::IntArrayRef padding) {
    const bool pads = padding.front() != 0 || padding.back() != 0;
    const std::array<std::int64_t, 4> edges{padding.back(), padding.back(), padding.front(), padding.front()};
    const auto padded = (pads ? at::constant_pad_nd(x, edges) : x).contiguous();
    const auto shape = shape_of(padded, weight);
    const auto& kernel = kernels::conv_pool_kernels();
    const auto images = padded.size(0), winners = kernel.winner_count(shape);
    const auto contiguous_weight = weight.contiguous(), contiguous_bias = bias.contiguous();
    auto output = at::empty({images, shape.filters, shape.out_h(), shape.out_w()}, x.options());
    auto winner = at::empty({images * winners}, x.options().dtype(at::kByte));
    for_parts(images, parts_of(images), [&](std::int64_t, std::int64_t first, std::size_t count) {
      kernel.forward(shape, count, padded.const_data_ptr<float>() + first * padded.stride(0),
                     contiguous_weight.const_data_ptr<float>(), contiguous_bias.const_data_ptr<float>(),
                     output.mutable_data_ptr<float>() + first * output.stride(0),
                     winner.mutable_data_ptr<std::uint8_t>() + first * winners);
    });
    context->save_for_backward({x, weight, bias, padded, winner});
    context->saved_data["padding"] = padding;
    return output;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    if (at::GradMode::is_enabled()) {
      const auto padding = context->saved_data["padding"].toIntVector();
      auto result = double_backward([&](const auto& inputs) { return plain(saved[0], inputs[0], inputs[1], padding); },
                                    {saved[1], saved[2]}, gradients[0]);
      return {Tensor(), result[0], result[1], Tensor()};
    }
    const auto &weight = saved[1], &padded = saved[3], &winner = saved[4];
    const auto shape = shape_of(padded, weight);
    const auto& kernel = kernels::conv_pool_kernels();
    const auto images = padded.size(0), winners = kernel.winner_count(shape), parts = parts_of(images);
    const auto grad_output = resolved(gradients[0]).contiguous();
    auto grad_weight = at::empty({parts, weight.numel()}, weight.options());
    auto grad_bias = at::empty({parts, shape.filters}, weight.options());
    for_parts(images, parts, [&](std::int64_t part, std::int64_t first, std::size_t count) {
      kernel.backward(shape, count, padded.const_data_ptr<float>() + first * padded.stride(0),
                      grad_output.const_data_ptr<float>() + first * grad_output.stride(0),
                      winner.const_data_ptr<std::uint8_t>() + first * winners,
                      grad_weight.mutable_data_ptr<float>() + part * weight.numel(),
                      grad_bias.mutable_data_ptr<float>() + part * shape.filters);
    });
    if (parts > 1) {
      grad_weight = grad_weight.sum(0);
      grad_bias = grad_bias.sum(0);
    }
    return {Tensor(), grad_weight.view(weight.sizes()), grad_bias.view({-1}), Tensor()};
  }
};

}  // namespace

Tensor conv2d_relu_max_pool2d(const Tensor& x, const Tensor& weight, const Tensor& bias, at::IntArrayRef padding) {
  if (!covered(x, weight, bias, padding)) return plain(x, weight, bias, padding);
  return ConvPoolFunction::apply(x, weight, bias.defined() ? bias : at::zeros({weight.size(0)}, weight.options()),
                                 padding);
}

}  // namespace lockstep::ops
