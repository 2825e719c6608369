// Pooling of CPU tensors. LibTorch reads a contiguous image element by element, the kernels here read vectors. Its
// max_pool2d is replaced in its dispatcher. Whatever they do not cover goes to LibTorch as before.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/native/Pool.h>
#include <ATen/ops/max_pool2d_compositeimplicitautograd_dispatch.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>

#include "kernels/pooling.h"
#include "lockstep/ops/ops.h"
#include "ops/fast.h"

namespace lockstep::ops {
namespace {

using at::Tensor;
using kernels::Pooling;

// One number for both directions, or two; `otherwise` for none.
std::optional<std::array<std::int64_t, 2>> pair_of(at::IntArrayRef values, std::array<std::int64_t, 2> otherwise) {
  if (values.empty()) return otherwise;
  if (values.size() == 1) return {{values[0], values[0]}};
  if (values.size() == 2) return {{values[0], values[1]}};
  return {};
}

// The geometry, or nothing where LibTorch must look at the arguments itself.
std::optional<Pooling> pooling_of(const Tensor& x, at::IntArrayRef kernel, at::IntArrayRef strides,
                                  at::IntArrayRef paddings, at::IntArrayRef dilations, bool ceil_mode) {
  if (x.dim() != 4 && x.dim() != 3) return {};
  const auto size = pair_of(kernel, {0, 0});
  const auto stride = pair_of(strides, size.value_or(std::array<std::int64_t, 2>{}));
  const auto padding = pair_of(paddings, {0, 0});
  const auto dilation = pair_of(dilations, {1, 1});
  if (!size || !stride || !padding || !dilation) return {};
  Pooling p{.in_h = x.size(-2),
            .in_w = x.size(-1),
            .out_h = 0,
            .out_w = 0,
            .size_h = (*size)[0],
            .size_w = (*size)[1],
            .stride_h = (*stride)[0],
            .stride_w = (*stride)[1],
            .padding_h = (*padding)[0],
            .padding_w = (*padding)[1],
            .dilation_h = (*dilation)[0],
            .dilation_w = (*dilation)[1]};
  // Every window must hold an element of the image: with padding, none may lie wholly outside it.
  const auto usable = [](std::int64_t in, std::int64_t window, std::int64_t step, std::int64_t pad,
                         std::int64_t spread) {
    return window > 0 && window <= 256 && step > 0 && spread > 0 && pad >= 0 && pad <= window / 2 &&
           (pad == 0 || spread <= in) && in + 2 * pad >= spread * (window - 1) + 1;
  };
  if (!usable(p.in_h, p.size_h, p.stride_h, p.padding_h, p.dilation_h) ||
      !usable(p.in_w, p.size_w, p.stride_w, p.padding_w, p.dilation_w) || p.size_h * p.size_w > 256) {
    return {};
  }
  p.out_h = at::native::pooling_output_shape(p.in_h, p.size_h, p.padding_h, p.stride_h, p.dilation_h, ceil_mode);
  p.out_w = at::native::pooling_output_shape(p.in_w, p.size_w, p.padding_w, p.stride_w, p.dilation_w, ceil_mode);
  return p;
}

// Runs `call(first, count)` over ranges of `total` independent pieces of `elements` each, on the threads of this
// replica.
template <class Call>
void in_parallel(std::int64_t total, std::int64_t elements, const Call& call) {
  at::parallel_for(0, total, std::max<std::int64_t>(1, 32768 / elements),
                   [&](std::int64_t begin, std::int64_t end) { call(begin, static_cast<std::size_t>(end - begin)); });
}

// How the elements of x lie: [planes][height][width], or [images][height][width][channels].
struct Order {
  at::MemoryFormat format;
  std::int64_t pieces, channels;  // channels are 1 in planes

  bool planes() const { return format == at::MemoryFormat::Contiguous; }
};
Order order_of(const Tensor& x) {
  const bool images =
      x.dim() == 4 && x.size(1) > 1 && !x.is_contiguous() && x.is_contiguous(at::MemoryFormat::ChannelsLast);
  if (images) return {at::MemoryFormat::ChannelsLast, x.size(0), x.size(1)};
  return {at::MemoryFormat::Contiguous, x.numel() / (x.size(-1) * x.size(-2)), 1};
}

std::vector<std::int64_t> sizes_after(const Tensor& x, const Pooling& p) {
  auto sizes = x.sizes().vec();
  *(sizes.end() - 2) = p.out_h;
  *(sizes.end() - 1) = p.out_w;
  return sizes;
}

// Bytes laid out as `like`.
Tensor empty_winners(const Tensor& like) {
  const auto slack = static_cast<std::int64_t>(kernels::kWinnerSlack);
  return at::empty({like.numel() + slack}, like.options().dtype(at::kByte)).as_strided(like.sizes(), like.strides());
}

Tensor pool(const Tensor& input, const Pooling& p, Tensor* winners) {
  const auto order = order_of(input);
  const auto x = input.contiguous(order.format);
  auto output = at::empty(sizes_after(x, p), x.options(), order.format);
  if (winners != nullptr) *winners = empty_winners(output);
  const auto& kernel = kernels::pooling_kernels();
  const auto in = p.in_h * p.in_w * order.channels, out = p.out_h * p.out_w * order.channels;
  const float* from = x.const_data_ptr<float>();
  auto* to = output.mutable_data_ptr<float>();
  auto* won = winners == nullptr ? nullptr : winners->mutable_data_ptr<std::uint8_t>();
  in_parallel(order.pieces, in, [&](std::int64_t first, std::size_t count) {
    auto* winner = won == nullptr ? nullptr : won + first * out;
    if (order.planes()) {
      kernel.max_planes(p, count, from + first * in, to + first * out, winner);
    } else {
      kernel.max_images(p, count, static_cast<std::size_t>(order.channels), from + first * in, to + first * out,
                        winner);
    }
  });
  return output;
}

Tensor pool_backward(const Tensor& gradient, const Tensor& winners, at::IntArrayRef input_sizes, const Pooling& p) {
  const auto order = order_of(winners);
  const auto grad_output = gradient.contiguous(order.format);
  auto result = at::empty(input_sizes, gradient.options(), order.format);
  const auto& kernel = kernels::pooling_kernels();
  const auto in = p.in_h * p.in_w * order.channels, out = p.out_h * p.out_w * order.channels;
  const auto* from = grad_output.const_data_ptr<float>();
  const auto* won = winners.const_data_ptr<std::uint8_t>();
  auto* to = result.mutable_data_ptr<float>();
  in_parallel(order.pieces, in, [&](std::int64_t first, std::size_t count) {
    if (order.planes()) {
      kernel.max_planes_backward(p, count, from + first * out, won + first * out, to + first * in);
    } else {
      kernel.max_images_backward(p, count, static_cast<std::size_t>(order.channels), from + first * out,
                                 won + first * out, to + first * in);
    }
  });
  return result;
}

// Backward in LibTorch's operators, for a gradient that will be differentiated again.
Tensor differentiable_backward(const Tensor& gradient, const Tensor& winners, at::IntArrayRef input_sizes,
                               const Pooling& p) {
  const auto number = at::TensorOptions(at::kLong);
  const auto position = winners.to(at::kLong);
  const auto rows = at::arange(p.out_h, number).mul(p.stride_h).sub(p.padding_h).unsqueeze(1) +
                    position.div(p.size_w, "floor").mul(p.dilation_h);
  const auto columns =
      at::arange(p.out_w, number).mul(p.stride_w).sub(p.padding_w) + position.remainder(p.size_w).mul(p.dilation_w);
  const auto index = (rows * p.in_w + columns).flatten(-2);
  auto sizes = input_sizes.vec();
  sizes.pop_back();
  sizes.back() = p.in_h * p.in_w;
  return at::zeros(sizes, gradient.options()).scatter_add(-1, index, gradient.flatten(-2)).reshape(input_sizes);
}

// Saves the numbers that backward needs besides tensors.
void save(torch::autograd::AutogradContext* context, const Pooling& p, at::IntArrayRef input_sizes) {
  context->saved_data["input_sizes"] = input_sizes;
  context->saved_data["pooling"] =
      c10::IntArrayRef{p.in_h,     p.in_w,     p.out_h,     p.out_w,     p.size_h,     p.size_w,
                       p.stride_h, p.stride_w, p.padding_h, p.padding_w, p.dilation_h, p.dilation_w};
}
Pooling saved_pooling(torch::autograd::AutogradContext* context) {
  const auto v = context->saved_data["pooling"].toIntVector();
  return {v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11]};
}

struct MaxPool2d : torch::autograd::Function<MaxPool2d> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Pooling& p) {
    Tensor winners;
    auto output = pool(x, p, &winners);
    context->save_for_backward({winners});
    save(context, p, x.sizes());
    return output;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto p = saved_pooling(context);
    const auto winners = context->get_saved_variables()[0];
    const auto sizes = context->saved_data["input_sizes"].toIntVector();
    const bool again = at::GradMode::is_enabled() && gradients[0].requires_grad();
    return {again ? differentiable_backward(gradients[0], winners, sizes, p)
                  : pool_backward(resolved(gradients[0]), winners, sizes, p),
            Tensor()};
  }
};

Tensor max_pool2d(const Tensor& x, at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding,
                  at::IntArrayRef dilation, bool ceil_mode) {
  // Pooling only selects elements, so computing in float gives the same ones; LibTorch reads 16-bit numbers one by one.
  const bool half = x.is_cpu() && (x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf);
  if (half && fast_operators()) {
    return at::max_pool2d(x.to(at::kFloat), kernel, stride, padding, dilation, ceil_mode).to(x.scalar_type());
  }
  const auto pooling = fast_operators() && fast(x) ? pooling_of(x, kernel, stride, padding, dilation, ceil_mode)
                                                   : std::optional<Pooling>();
  if (!pooling) return at::compositeimplicitautograd::max_pool2d(x, kernel, stride, padding, dilation, ceil_mode);
  if (at::GradMode::is_enabled() && x.requires_grad()) return MaxPool2d::apply(x, *pooling);
  const at::AutoDispatchBelowADInplaceOrView below;
  return pool(x, *pooling, nullptr);
}

struct AveragePool2d : torch::autograd::Function<AveragePool2d> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& input, const Pooling& p) {
    const auto x = input.contiguous();
    auto output = at::empty(sizes_after(x, p), x.options());
    const auto* from = x.const_data_ptr<float>();
    auto* to = output.mutable_data_ptr<float>();
    in_parallel(x.numel() / (p.in_h * p.in_w), p.in_h * p.in_w, [&](std::int64_t first, std::size_t count) {
      kernels::pooling_kernels().average_planes(p, count, from + first * p.in_h * p.in_w, factor_of(p),
                                                to + first * p.out_h * p.out_w);
    });
    save(context, p, x.sizes());
    return output;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto sizes = context->saved_data["input_sizes"].toIntVector();
    const auto p = saved_pooling(context);
    if (at::GradMode::is_enabled() && gradients[0].requires_grad()) {
      const auto like = at::empty({1}, gradients[0].options()).expand(sizes);
      return {at::avg_pool2d_backward(gradients[0], like, {p.size_h, p.size_w}, {p.stride_h, p.stride_w}, 0, false,
                                      true, std::nullopt),
              Tensor()};
    }
    const auto grad_output = resolved(gradients[0]).contiguous();
    auto result = at::empty(sizes, grad_output.options());
    const auto* from = grad_output.const_data_ptr<float>();
    auto* to = result.mutable_data_ptr<float>();
    in_parallel(result.numel() / (p.in_h * p.in_w), p.in_h * p.in_w, [&](std::int64_t first, std::size_t count) {
      kernels::pooling_kernels().average_planes_backward(p, count, from + first * p.out_h * p.out_w, factor_of(p),
                                                         to + first * p.in_h * p.in_w);
    });
    return {result, Tensor()};
  }

  static float factor_of(const Pooling& p) { return 1 / static_cast<float>(p.size_h * p.size_w); }
};

TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) { library.impl("max_pool2d", TORCH_FN(max_pool2d)); }

}  // namespace

Tensor avg_pool2d(const Tensor& x, at::IntArrayRef kernel_size, at::IntArrayRef stride) {
  // With channels last LibTorch's own is as fast.
  if (fast_operators() && fast(x) && order_of(x).planes()) {
    if (const auto p = pooling_of(x, kernel_size, stride, 0, 1, false)) return AveragePool2d::apply(x, *p);
  }
  return at::avg_pool2d(x, kernel_size, stride);
}

}  // namespace lockstep::ops
