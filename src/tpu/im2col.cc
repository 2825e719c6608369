#include "tpu/im2col.h"

#include <algorithm>
#include <functional>
#include <numeric>

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

}  // namespace lockstep::tpu
