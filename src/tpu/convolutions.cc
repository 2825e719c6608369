#include "tpu/composed.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <tuple>

#include "base/text.h"

namespace lockstep::tpu {

namespace {

constexpr std::int64_t kFewElements = 64, kFewPlaces = 25;

Sizes spatial_of(const Sizes& sizes) { return {sizes.begin() + 2, sizes.end()}; }

std::int64_t product_of(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

// The elements of a window of such sizes, in row-major order.
std::vector<Sizes> elements_of(const Sizes& window) {
  std::vector<Sizes> elements;
  for (std::int64_t i = 0; i < product_of(window); ++i) {
    Sizes element(window.size());
    auto rest = i;
    for (std::size_t k = window.size(); k-- > 0; rest /= window[k]) element[k] = rest % window[k];
    elements.push_back(std::move(element));
  }
  return elements;
}

// x [batch, channels, ...] as [batch, ..., a window's elements x channels, 1]: the elements of each window, and a 1
// after them. outputs: the sizes of the result's spatial dimensions.
Value columns_of(Call& call, const Value& x, const Sizes& outputs, const Sizes& window,
                 const ConvolutionOptions& options) {
  auto& program = call.program();
  const auto rank = x.shape.sizes.size();
  Sizes low(rank), high(rank);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto needed = (outputs[i] - 1) * options.stride[i] + options.dilation[i] * (window[i] - 1) + 1;
    low[i + 1] = options.padding[i];
    high[i + 1] = std::max<std::int64_t>(needed - x.shape.sizes[i + 2] - options.padding[i], 0);
  }
  const auto padded = program.pad(program.transpose(x, channels_last(outputs.size())), 0, low, high, Sizes(rank));
  std::vector<Value> parts;
  for (const auto& element : elements_of(window)) {
    Sizes begin(rank), end = padded.shape.sizes, step(rank, 1);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      begin[i + 1] = element[i] * options.dilation[i];
      end[i + 1] = begin[i + 1] + (outputs[i] - 1) * options.stride[i] + 1;
      step[i + 1] = options.stride[i];
    }
    parts.push_back(program.slice(padded, begin, end, step));
  }
  auto ones = parts[0].shape;
  ones.sizes.back() = 1;
  parts.push_back(program.constant(1, ones));
  return program.concatenate(parts, static_cast<std::int64_t>(rank - 1));
}

// The permutation that makes [..., channels, outputs] of a weight [outputs, channels, ...].
Sizes outputs_last(std::size_t spatial) {
  Sizes permutation(spatial);
  std::iota(permutation.begin(), permutation.end(), 2);
  permutation.insert(permutation.end(), {1, 0});
  return permutation;
}

}  // namespace

Sizes channels_last(std::size_t spatial) {
  Sizes permutation(spatial + 2);
  std::iota(permutation.begin() + 1, permutation.end() - 1, 2);
  permutation.back() = 1;
  return permutation;
}

bool is_fast_by_im2col(Call& call, const Sizes& weight, const ConvolutionOptions& options) {
  return call.is_for_cpu() && !options.transposed && options.groups == 1 &&
         product_of(spatial_of(weight)) <= kFewPlaces && product_of(spatial_of(weight)) * weight[1] <= kFewElements;
}

Value convolve_by_im2col(Call& call, const Value& x, const Value& weight, const Value& bias, const Sizes& sizes,
                         const ConvolutionOptions& options) {
  auto& program = call.program();
  const auto spatial = options.stride.size();
  const auto outputs = sizes[1];
  const auto columns = columns_of(call, x, spatial_of(sizes), spatial_of(weight.shape.sizes), options);
  const auto matrix =
      program.reshape(program.transpose(weight, outputs_last(spatial)), {columns.shape.sizes.back() - 1, outputs});
  const auto last =
      bias.name.empty() ? program.constant(0, {x.shape.dtype, {1, outputs}}) : program.reshape(bias, {1, outputs});
  const auto product =
      program.dot(columns, program.concatenate({matrix, last}, 0), {static_cast<std::int64_t>(spatial + 1)}, {0});
  return program.transpose(product, pjrt::inverse(channels_last(spatial)));
}

std::pair<Value, Value> gradients_by_im2col(Call& call, const Value& gradient, const Value& x, const Sizes& weight,
                                            const ConvolutionOptions& options) {
  auto& program = call.program();
  const auto spatial = options.stride.size();
  const auto columns = columns_of(call, x, spatial_of(gradient.shape.sizes), spatial_of(weight), options);
  Sizes places(spatial + 1);
  std::iota(places.begin(), places.end(), 0);
  const auto product = program.dot(columns, program.transpose(gradient, channels_last(spatial)), places, places);
  const auto count = columns.shape.sizes.back() - 1;
  const auto of_weight = program.slice(product, {0, 0}, {count, weight[0]}, {1, 1});
  const auto of_bias = program.slice(product, {count, 0}, {count + 1, weight[0]}, {1, 1});
  const auto order = outputs_last(spatial);
  return {program.transpose(program.reshape(of_weight, pjrt::permuted(weight, order)), pjrt::inverse(order)),
          program.reshape(of_bias, {weight[0]})};
}

// Convolutions of any rank, with groups, stride, padding and dilation, and their gradients.

namespace {

// A number for each spatial dimension.
struct Window {
  Sizes stride, low, high, dilation_of_x, dilation_of_weight;
};

std::string padding_of(const Window& window) {
  std::string pairs;
  for (std::size_t i = 0; i < window.low.size(); ++i)
    pairs += text(i == 0 ? "" : ", ", "[", window.low[i], ", ", window.high[i], "]");
  return text("padding = dense<[", pairs, "]> : tensor<", window.low.size(), "x2xi64>");
}

// The order of an array's dimensions in StableHLO: "b*f" for [b, 0, 1, f]. The spatial dimensions stand at the star.
std::string order_of(std::string_view letters, std::size_t rank) {
  std::vector<std::string> order;
  for (const char letter : letters) {
    if (letter != '*') order.emplace_back(1, letter);
    for (std::size_t i = 0; letter == '*' && i < rank; ++i) order.push_back(std::to_string(i));
  }
  return text("[", join(order), "]");
}

// The orders of x, the weight and the result.
using Orders = std::array<std::string_view, 3>;

// x * weight: [b, f, ...] and [o, i, ...], or as `orders` says; its arrays whose channels are last are given, and
// returned, with the channels second. Convolutions are fastest where the channels come last, so that chains of
// operators between two of them are made in that order (ProgramText::elementwise).
Value convolve(Call& call, const Value& x, const Value& weight, const Shape& result, const Window& window,
               const Orders& orders, std::int64_t feature_groups, std::int64_t batch_groups) {
  auto& program = call.program();
  const auto rank = window.stride.size();
  const auto permutation = channels_last(rank);
  const auto has_channels_last = [&](std::size_t i) { return !orders[i].ends_with('*'); };
  const auto as = [&](const Value& value, std::size_t i) {
    return has_channels_last(i) ? program.transpose(value, permutation) : value;
  };
  const Shape computed{result.dtype, has_channels_last(2) ? pjrt::permuted(result.sizes, permutation) : result.sizes};
  const auto made = program.add(
      "stablehlo.convolution", {as(x, 0), as(weight, 1)}, computed,
      text("dimension_numbers = #stablehlo.conv<", order_of(orders[0], rank), "x", order_of(orders[1], rank), "->",
           order_of(orders[2], rank), ">, window_strides = ", pjrt::array_of(window.stride), ", ", padding_of(window),
           ", lhs_dilation = ", pjrt::array_of(window.dilation_of_x),
           ", rhs_dilation = ", pjrt::array_of(window.dilation_of_weight), ", feature_group_count = ", feature_groups,
           " : i64, batch_group_count = ", batch_groups, " : i64, ", pjrt::kHighestPrecision));
  return has_channels_last(2) ? program.transpose(made, pjrt::inverse(permutation)) : made;
}

constexpr Orders kForward{"b*f", "oi*", "b*f"};

Value reversed(Call& call, const Value& weight) {
  Sizes dimensions;
  for (std::size_t i = 2; i < weight.shape.sizes.size(); ++i) dimensions.push_back(static_cast<std::int64_t>(i));
  return call.program().add("stablehlo.reverse", {weight}, weight.shape, "dimensions = " + pjrt::array_of(dimensions));
}

// [groups a, b, ...] as [groups b, a, ...].
Value swapped_in_groups(Call& call, const Value& weight, std::int64_t groups) {
  auto& program = call.program();
  const auto& sizes = weight.shape.sizes;
  Sizes grouped{groups, sizes[0] / groups, sizes[1]}, permutation{0, 2, 1}, flat{groups * sizes[1], sizes[0] / groups};
  for (std::size_t i = 2; i < sizes.size(); ++i) {
    grouped.push_back(sizes[i]);
    permutation.push_back(static_cast<std::int64_t>(i + 1));
    flat.push_back(sizes[i]);
  }
  return program.reshape(program.transpose(program.reshape(weight, grouped), permutation), flat);
}

// The arguments of a convolution from place `i` on: stride, padding, dilation, transposed, output_padding, groups.
ConvolutionOptions options_in(Call& call, std::size_t i, std::size_t rank) {
  const auto each = [&](std::size_t place) {
    auto numbers = call.integers(place);
    if (numbers.size() == 1) numbers.resize(rank, numbers[0]);
    return numbers;
  };
  return {each(i), each(i + 1), each(i + 2), each(i + 4), call.flag(i + 3), call.integer(i + 5)};
}

// `sizes`: the result's.
Value forward(Call& call, const Value& x, const Value& weight, const Sizes& sizes, const ConvolutionOptions& options) {
  const auto rank = options.stride.size();
  Window window{options.stride, options.padding, {}, Sizes(rank, 1), options.dilation};
  for (std::size_t i = 0; i < rank; ++i) {
    const auto reach = options.dilation[i] * (weight.shape.sizes[i + 2] - 1) + 1;
    window.high.push_back((sizes[i + 2] - 1) * options.stride[i] + reach - x.shape.sizes[i + 2] - window.low[i]);
  }
  return convolve(call, x, weight, {x.shape.dtype, sizes}, window, kForward, options.groups, 1);
}

// The gradient of forward's x, from that of the result; `sizes`: x's.
Value gradient_of_x(Call& call, const Value& gradient, const Value& weight, const Sizes& sizes,
                    const ConvolutionOptions& options) {
  const auto rank = options.stride.size();
  Window window{Sizes(rank, 1), {}, {}, options.stride, options.dilation};
  for (std::size_t i = 0; i < rank; ++i) {
    const auto reach = options.dilation[i] * (weight.shape.sizes[i + 2] - 1);
    const auto spread = options.stride[i] * (gradient.shape.sizes[i + 2] - 1) + 1;
    window.low.push_back(reach - options.padding[i]);
    window.high.push_back(sizes[i + 2] - spread + reach - window.low[i]);
  }
  const auto kernel = reversed(call, swapped_in_groups(call, weight, options.groups));
  return convolve(call, gradient, kernel, {gradient.shape.dtype, sizes}, window, kForward, options.groups, 1);
}

// The gradient of forward's weight; `sizes`: the weight's. Each channel of x is an example, and each example a channel.
Value gradient_of_channels(Call& call, const Value& gradient, const Value& x, const Sizes& sizes,
                           const ConvolutionOptions& options) {
  const auto rank = options.stride.size();
  Window window{options.dilation, options.padding, {}, Sizes(rank, 1), options.stride};
  for (std::size_t i = 0; i < rank; ++i) {
    const auto spread = options.stride[i] * (gradient.shape.sizes[i + 2] - 1) + 1;
    window.high.push_back(options.dilation[i] * (sizes[i + 2] - 1) + spread - x.shape.sizes[i + 2] -
                          options.padding[i]);
  }
  constexpr Orders kOrders{"f*b", "i*o", "fb*"};
  return convolve(call, x, gradient, {gradient.shape.dtype, sizes}, window, kOrders, 1, options.groups);
}

// x with zeros after it in `dimension`, up to `size`; the compiler does not take the zeros away.
Value filled_up(Call& call, const Value& x, std::size_t dimension, std::int64_t size) {
  const Sizes none(x.shape.sizes.size(), 0);
  auto high = none;
  high[dimension] = size - x.shape.sizes[dimension];
  const auto filled = call.program().pad(x, 0, none, high, none);
  return call.program().add("stablehlo.optimization_barrier", {filled}, filled.shape);
}

// Calls gradient_of_channels, with at least 8 channels. libtpu 0.0.51 compiles this convolution of float32 slowly with
// fewer: 31 s for 1 and 32 channels, 3 s for 8 and 32. The step of README's network did not end in 3 minutes. A TPU
// fills channels up to 8 anyway.
Value gradient_of_weight(Call& call, const Value& gradient, const Value& x, const Sizes& sizes,
                         const ConvolutionOptions& options) {
  constexpr std::int64_t kChannels = 8;
  if (call.is_for_cpu() || options.groups > 1 || std::min(sizes[0], sizes[1]) >= kChannels)
    return gradient_of_channels(call, gradient, x, sizes, options);
  auto filled = sizes;
  for (const std::size_t i : {0, 1}) filled[i] = std::max(sizes[i], kChannels);
  const auto result = gradient_of_channels(call, filled_up(call, gradient, 1, filled[0]),
                                           filled_up(call, x, 1, filled[1]), filled, options);
  const Sizes none(sizes.size(), 0), ones(sizes.size(), 1);
  const auto kept = call.program().add("stablehlo.optimization_barrier", {result}, result.shape);
  return call.program().slice(kept, none, sizes, ones);
}

Value with_bias(Call& call, const Value& y, std::size_t place) {
  if (!call.has(place)) return y;
  const auto bias = call.program().broadcast(call.value(place), y.shape.sizes, {1});
  return call.program().plus(y, bias);
}

// A transposed convolution is the gradient of forward's x; its weight is [in, out / groups, ...].
void convolution(Call& call) {
  const auto x = call.value(0), weight = call.value(1);
  const auto rank = x.shape.sizes.size() - 2;
  const auto options = options_in(call, 3, rank);
  Sizes sizes{x.shape.sizes[0], options.transposed ? weight.shape.sizes[1] * options.groups : weight.shape.sizes[0]};
  for (std::size_t i = 0; i < rank; ++i) {
    const auto size = x.shape.sizes[i + 2], reach = options.dilation[i] * (weight.shape.sizes[i + 2] - 1) + 1;
    sizes.push_back(options.transposed
                        ? (size - 1) * options.stride[i] - 2 * options.padding[i] + reach + options.output_padding[i]
                        : (size + 2 * options.padding[i] - reach) / options.stride[i] + 1);
  }
  if (is_fast_by_im2col(call, weight.shape.sizes, options)) {
    const auto bias = call.has(2) ? call.value(2) : Value();
    return call.returns({convolve_by_im2col(call, x, weight, bias, sizes, options)});
  }
  if (!options.transposed) return call.returns({with_bias(call, forward(call, x, weight, sizes, options), 2)});
  call.returns({with_bias(call, gradient_of_x(call, x, weight, sizes, options), 2)});
}

// Gradients of x, the weight and the bias, where the mask in place 10 asks for them.
void convolution_backward(Call& call) {
  const auto gradient = call.value(0), x = call.value(1), weight = call.value(2);
  const auto options = options_in(call, 4, x.shape.sizes.size() - 2);
  const auto asked = call.argument(10).toBoolList();
  std::array<Value, 3> results;
  if (asked[0])
    results[0] = options.transposed ? forward(call, gradient, weight, x.shape.sizes, options)
                                    : gradient_of_x(call, gradient, weight, x.shape.sizes, options);
  if (asked[1] && is_fast_by_im2col(call, weight.shape.sizes, options)) {
    std::tie(results[1], results[2]) = gradients_by_im2col(call, gradient, x, weight.shape.sizes, options);
  } else {
    if (asked[1])
      results[1] = options.transposed ? gradient_of_weight(call, x, gradient, weight.shape.sizes, options)
                                      : gradient_of_weight(call, gradient, x, weight.shape.sizes, options);
    if (asked[2]) {
      Sizes others{0};
      for (std::size_t i = 2; i < gradient.shape.sizes.size(); ++i) others.push_back(static_cast<std::int64_t>(i));
      results[2] = sum_over(call, gradient, others);
    }
  }
  std::vector<Value> returned;
  for (std::size_t i = 0; i < 3; ++i) {
    if (asked[i]) returned.push_back(results[i]);
  }
  call.returns(std::move(returned));
  for (std::size_t i = 0; i < 3; ++i)
    if (!asked[i]) call.returns_none(i);
}

}  // namespace

void add_convolutions(Lowerings& table) {
  table["aten::convolution"] = convolution;
  table["aten::convolution_backward"] = convolution_backward;
}

}  // namespace lockstep::tpu
