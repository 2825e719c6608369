// Compiled once for each kind of processor by Highway; the compiler vectorizes the loops.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/bias.cc"
#include <hwy/foreach_target.h>
// Highway's own include comes after foreach_target.
#include <hwy/highway.h>

#include "kernels/matrix.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::kernels::HWY_NAMESPACE {
namespace {

void forward(float* HWY_RESTRICT y, std::int64_t rows, std::int64_t columns, const float* HWY_RESTRICT bias,
             bool relu) {
  for (std::int64_t row = 0; row < rows; ++row, y += columns) {
    if (bias != nullptr) {
      for (std::int64_t i = 0; i < columns; ++i) y[i] += bias[i];
    }
    if (relu) {
      for (std::int64_t i = 0; i < columns; ++i) y[i] = y[i] <= 0 ? 0 : y[i];
    }
  }
}

void relu_backward(const float* HWY_RESTRICT grad_output, const float* HWY_RESTRICT y, std::int64_t count,
                   float* HWY_RESTRICT grad_input) {
  for (std::int64_t i = 0; i < count; ++i) grad_input[i] = y[i] <= 0 ? 0 : grad_output[i];
}

void sum_rows(const float* HWY_RESTRICT gradient, std::int64_t rows, std::int64_t columns,
              float* HWY_RESTRICT grad_bias) {
  for (std::int64_t i = 0; i < columns; ++i) grad_bias[i] = 0;
  for (std::int64_t row = 0; row < rows; ++row, gradient += columns) {
    for (std::int64_t i = 0; i < columns; ++i) grad_bias[i] += gradient[i];
  }
}

constexpr BiasKernels kTable = {forward, relu_backward, sum_rows};
const BiasKernels* table() { return &kTable; }

}  // namespace
}  // namespace lockstep::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::kernels {

HWY_EXPORT(table);

const BiasKernels& bias_kernels() { return *HWY_DYNAMIC_DISPATCH(table)(); }

}  // namespace lockstep::kernels
#endif
