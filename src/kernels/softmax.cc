// Compiled once for each kind of processor by Highway.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/softmax.cc"
#include <hwy/foreach_target.h>
// Highway's own include comes after foreach_target.
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/lanes-inl.h"
#include "kernels/matrix.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::kernels::HWY_NAMESPACE {
namespace {

// NaN where one of the values is.
float largest(const float* values, std::int64_t count) {
  auto most = hn::Set(kFloats, -std::numeric_limits<float>::infinity());
  bool nan = false;
  std::int64_t i = 0;
  for (; i + lanes() <= count; i += lanes()) {
    const auto next = hn::LoadU(kFloats, values + i);
    most = hn::Max(most, next);
    nan |= !hn::AllFalse(kFloats, hn::IsNaN(next));
  }
  float result = hn::GetLane(hn::MaxOfLanes(kFloats, most));
  for (; i < count; ++i) {
    result = std::max(result, values[i]);
    nan |= std::isnan(values[i]);
  }
  return nan ? std::numeric_limits<float>::quiet_NaN() : result;
}

// powers = exp(values - most); returns their sum.
float exponentials(const float* values, std::int64_t count, float most, float* powers) {
  const auto shift = hn::Set(kFloats, most);
  auto sum = hn::Zero(kFloats);
  std::int64_t i = 0;
  for (; i + lanes() <= count; i += lanes()) {
    const auto power = hn::Exp(kFloats, hn::Sub(hn::LoadU(kFloats, values + i), shift));
    hn::StoreU(power, kFloats, powers + i);
    sum = hn::Add(sum, power);
  }
  float result = hn::GetLane(hn::SumOfLanes(kFloats, sum));
  const First rest(count - i);
  if (i < count) rest.store(hn::Exp(kFloats, hn::Sub(rest.load(values + i), shift)), powers + i);
  for (; i < count; ++i) result += powers[i];
  return result;
}

void cross_entropy(const float* logits, const std::int64_t* label, std::int64_t rows, std::int64_t classes, float* loss,
                   float* probability) {
  for (std::int64_t row = 0; row < rows; ++row, logits += classes, probability += classes) {
    const float most = largest(logits, classes);
    const float sum = exponentials(logits, classes, most, probability);
    const float scale = 1 / sum;
    for (std::int64_t i = 0; i < classes; ++i) probability[i] *= scale;
    loss[row] = std::log(sum) + (most - logits[label[row]]);
  }
}

void cross_entropy_backward(const float* grad_loss, std::int64_t step, const float* probability,
                            const std::int64_t* label, std::int64_t rows, std::int64_t classes, float* grad_logits) {
  for (std::int64_t row = 0; row < rows; ++row, probability += classes, grad_logits += classes) {
    const float gradient = grad_loss[row * step];
    for (std::int64_t i = 0; i < classes; ++i) grad_logits[i] = gradient * probability[i];
    grad_logits[label[row]] -= gradient;
  }
}

constexpr SoftmaxKernels kTable = {cross_entropy, cross_entropy_backward};
const SoftmaxKernels* table() { return &kTable; }

}  // namespace
}  // namespace lockstep::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::kernels {

HWY_EXPORT(table);

const SoftmaxKernels& softmax_kernels() { return *HWY_DYNAMIC_DISPATCH(table)(); }

}  // namespace lockstep::kernels
#endif
