// Matrices of float: products, a bias and ReLU, softmax, transposition.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

// Products of matrices of float, by LIBXSMM: it compiles a kernel for each shape at run time.

// Rows of `data` lie `stride` elements apart; `transposed`: they are the matrix's columns.
struct Matrix {
  const float* data;
  std::int64_t stride;
  bool transposed = false;
};

// c[m][n] = a[m][k] b[k][n], where one of a and b may be transposed. Each element of c is one sum in the order of k,
// whatever m and n are. Nothing overlaps; no alignment is asked. Returns false, with c in any state, where LIBXSMM has
// no kernel for the shape or the processor. Any thread may call.
[[nodiscard]] bool multiply(std::int64_t m, std::int64_t n, std::int64_t k, Matrix a, Matrix b, float* c,
                            std::int64_t c_stride);

// Dense layers, each function in one pass. Matrices are [rows][columns], or [rows][classes], without gaps; labels are
// from 0 to classes - 1. Any thread may call.
struct DenseKernels {
  // y += bias (if not null) in each row; then, if `relu`, max(y, 0), NaN staying NaN.
  void (*add_bias)(float* y, std::int64_t rows, std::int64_t columns, const float* bias, bool relu);

  // grad_input = grad_output where y is not <= 0, else 0.
  void (*relu_backward)(const float* grad_output, const float* y, std::int64_t count, float* grad_input);

  // grad_bias = the sum of the rows of `gradient`.
  void (*sum_rows)(const float* gradient, std::int64_t rows, std::int64_t columns, float* grad_bias);

  // loss[row] = -log(softmax(logits[row])[label]); `probability` gets the softmax.
  void (*cross_entropy)(const float* logits, const std::int64_t* label, std::int64_t rows, std::int64_t classes,
                        float* loss, float* probability);

  // grad_logits = grad_loss[row * step] * (probability - 1 at the label); with a step of 0 one gradient serves all
  // rows.
  void (*cross_entropy_backward)(const float* grad_loss, std::int64_t step, const float* probability,
                                 const std::int64_t* label, std::int64_t rows, std::int64_t classes,
                                 float* grad_logits);
};

const DenseKernels& dense_kernels();

// A matrix's rows become columns. to[j * to_stride + i] = from[i * from_stride + j] for i < rows, j < columns. Any
// thread may call.
void transpose(const float* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns, float* to,
               std::int64_t to_stride);

}  // namespace lockstep::kernels
