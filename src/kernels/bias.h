// A bias and ReLU on the rows of a matrix, and their gradients, each in one pass.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

// Matrices are [rows][columns] without gaps. Any thread may call.
struct BiasKernels {
  // y += bias (if not null) in each row; then, if `relu`, max(y, 0), NaN staying NaN.
  void (*forward)(float* y, std::int64_t rows, std::int64_t columns, const float* bias, bool relu);

  // grad_input = grad_output where y is not <= 0, else 0.
  void (*relu_backward)(const float* grad_output, const float* y, std::int64_t count, float* grad_input);

  // grad_bias = the sum of the rows of `gradient`.
  void (*sum_rows)(const float* gradient, std::int64_t rows, std::int64_t columns, float* grad_bias);
};

const BiasKernels& bias_kernels();

}  // namespace lockstep::kernels
