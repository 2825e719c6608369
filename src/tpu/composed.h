// Lowerings that are made of others: of LibTorch's operators, of products of matrices, of sums over a batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "ops/parameter_hook.h"
#include "tpu/call.h"

namespace lockstep::tpu {

using Tensors = std::vector<at::Tensor>;

// `make` gives the operator's result, or several, of which some may be undefined.
template <class Make>
Lowering composed(Make make) {
  return [make](Call& call) { call.returns(make(call)); };
}

// Argument i, or undefined.
inline at::Tensor given(Call& call, std::size_t i) { return call.has(i) ? call.tensor(i) : at::Tensor(); }

// Convolutions as products of matrices (im2col; Chellapilla, Puri, Simard: High Performance Convolutional Neural
// Networks for Document Processing, 2006).

// The options of aten::convolution; stride, padding and dilation of each spatial dimension.
struct ConvolutionOptions {
  Sizes stride, padding, dilation, output_padding;
  bool transposed = false;
  std::int64_t groups = 1;
};

// The permutation that makes [batch, ..., channels] of [batch, channels, ...] with as many spatial dimensions.
Sizes channels_last(std::size_t spatial);

// True where a product is the fastest way: on CPUs where a window has at most 64 elements, of at most 25 places. So the
// product copies at most 25 times x.
bool is_fast_by_im2col(Call& call, const Sizes& weight, const ConvolutionOptions& options);

// x * weight + bias, of sizes `sizes`. There is no bias where its name is empty.
Value convolve_by_im2col(Call& call, const Value& x, const Value& weight, const Value& bias, const Sizes& sizes,
                         const ConvolutionOptions& options);

// The gradients of a weight of sizes `weight`, and of the bias, for the result's.
std::pair<Value, Value> gradients_by_im2col(Call& call, const Value& gradient, const Value& x, const Sizes& weight,
                                            const ConvolutionOptions& options);

// Computes a call of aten::batch_norm by operators that have gradients, and updates its running statistics. counts: 1
// for each row of the input that counts, else 0; undefined where all do.
at::Tensor batch_norm(const ops::OperatorCall& call, const at::Tensor& counts);

// The dimensions but channels of x [batch, channels, ...]; and a value a channel, shaped to broadcast along x.
std::vector<std::int64_t> all_but_channels(std::int64_t rank);
at::Tensor along_channels(const at::Tensor& values, const at::Tensor& x);  // values: [channels]

}  // namespace lockstep::tpu
