// Compiled once for each kind of processor by Highway, which picks the best at run time; the compiler vectorizes the
// loops.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/update.cc"
#include <hwy/foreach_target.h>
// Highway's own include comes after foreach_target.
#include <hwy/highway.h>

#include <cmath>

#include "kernels/update.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::kernels::HWY_NAMESPACE {
namespace {

template <class T>
void scaled_sum(const T* const* inputs, size_t n_inputs, T scale, T* HWY_RESTRICT out, size_t n) {
  const T* HWY_RESTRICT a = inputs[0];
  if (n_inputs == 1) {
    for (size_t i = 0; i < n; ++i) out[i] = a[i] * scale;
    return;
  }
  for (size_t k = 1; k < n_inputs; ++k) {
    const T* HWY_RESTRICT b = inputs[k];
    const T factor = k + 1 == n_inputs ? scale : T(1);
    if (k == 1) {
      for (size_t i = 0; i < n; ++i) out[i] = (a[i] + b[i]) * factor;
    } else {
      for (size_t i = 0; i < n; ++i) out[i] = (out[i] + b[i]) * factor;
    }
  }
}

// 32 partial sums: wide enough for any vector, and in one order on all of them.
template <class T>
double sum_of_squares(const T* HWY_RESTRICT values, size_t n) {
  double partial[32] = {};
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    for (size_t lane = 0; lane < 32; ++lane) {
      const double value = values[i + lane];
      partial[lane] += value * value;
    }
  }
  for (size_t lane = 0; i < n; ++i, ++lane) partial[lane] += static_cast<double>(values[i]) * values[i];
  double sum = 0;
  for (const double p : partial) sum += p;
  return sum;
}

template <class T>
void scale(T* HWY_RESTRICT values, T factor, size_t n) {
  for (size_t i = 0; i < n; ++i) values[i] *= factor;
}

template <class T>
void clip(T* HWY_RESTRICT values, T bound, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const T low = values[i] < -bound ? -bound : values[i];  // NaN stays NaN
    values[i] = low > bound ? bound : low;
  }
}

template <class T>
void sgd(T* HWY_RESTRICT value, const T* HWY_RESTRICT gradient, T rate, size_t n) {
  for (size_t i = 0; i < n; ++i) value[i] -= rate * gradient[i];
}

template <class T>
void sgd_momentum(T* HWY_RESTRICT value, const T* HWY_RESTRICT gradient, T* HWY_RESTRICT velocity,
                  const MomentumCoefficients& c, size_t n) {
  const T rate = static_cast<T>(c.rate);
  const T momentum = static_cast<T>(c.momentum);
  if (c.nesterov) {
    for (size_t i = 0; i < n; ++i) {
      velocity[i] = velocity[i] * momentum - gradient[i] * rate;
      value[i] += velocity[i] * momentum - gradient[i] * rate;
    }
  } else {
    for (size_t i = 0; i < n; ++i) {
      velocity[i] = velocity[i] * momentum - gradient[i] * rate;
      value[i] += velocity[i];
    }
  }
}

template <class T>
void adam(T* HWY_RESTRICT value, const T* HWY_RESTRICT gradient, T* HWY_RESTRICT m, T* HWY_RESTRICT v,
          T* HWY_RESTRICT largest, const AdamCoefficients& c, size_t n) {
  const T rate = static_cast<T>(c.rate);
  const T gain_1 = static_cast<T>(c.one_minus_beta_1);
  const T gain_2 = static_cast<T>(c.one_minus_beta_2);
  const T epsilon = static_cast<T>(c.epsilon);
  if (largest == nullptr) {
    for (size_t i = 0; i < n; ++i) {
      const T g = gradient[i];
      m[i] += (g - m[i]) * gain_1;
      v[i] += (g * g - v[i]) * gain_2;
      value[i] -= m[i] * rate / (std::sqrt(v[i]) + epsilon);
    }
  } else {
    for (size_t i = 0; i < n; ++i) {
      const T g = gradient[i];
      m[i] += (g - m[i]) * gain_1;
      v[i] += (g * g - v[i]) * gain_2;
      largest[i] = largest[i] < v[i] ? v[i] : largest[i];
      value[i] -= m[i] * rate / (std::sqrt(largest[i]) + epsilon);
    }
  }
}

template <class T>
void rmsprop(T* HWY_RESTRICT value, const T* HWY_RESTRICT gradient, T* HWY_RESTRICT square, T* HWY_RESTRICT mean,
             T* HWY_RESTRICT velocity, const RMSpropCoefficients& c, size_t n) {
  const T rate = static_cast<T>(c.rate);
  const T rho = static_cast<T>(c.rho);
  const T gain = static_cast<T>(1 - c.rho);
  const T momentum = static_cast<T>(c.momentum);
  const T epsilon = static_cast<T>(c.epsilon);
  for (size_t i = 0; i < n; ++i) {
    const T g = gradient[i];
    square[i] = rho * square[i] + gain * g * g;
    T denominator = square[i] + epsilon;
    if (mean != nullptr) {
      mean[i] = rho * mean[i] + gain * g;
      denominator -= mean[i] * mean[i];
    }
    const T step = rate * g / std::sqrt(denominator);
    if (velocity == nullptr) {
      value[i] -= step;
    } else {
      velocity[i] = momentum * velocity[i] + step;
      value[i] -= velocity[i];
    }
  }
}

template <class T>
void adagrad(T* HWY_RESTRICT value, const T* HWY_RESTRICT gradient, T* HWY_RESTRICT accumulator, T rate, T epsilon,
             size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const T g = gradient[i];
    accumulator[i] += g * g;
    value[i] -= rate * g / std::sqrt(accumulator[i] + epsilon);
  }
}

template <class T>
constexpr UpdateKernels<T> kTable = {
    .scaled_sum = scaled_sum<T>,
    .sum_of_squares = sum_of_squares<T>,
    .scale = scale<T>,
    .clip = clip<T>,
    .sgd = sgd<T>,
    .sgd_momentum = sgd_momentum<T>,
    .adam = adam<T>,
    .rmsprop = rmsprop<T>,
    .adagrad = adagrad<T>,
};

const UpdateKernels<float>* table_float() { return &kTable<float>; }
const UpdateKernels<double>* table_double() { return &kTable<double>; }

}  // namespace
}  // namespace lockstep::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::kernels {

HWY_EXPORT(table_float);
HWY_EXPORT(table_double);

template <>
const UpdateKernels<float>& update_kernels() {
  return *HWY_DYNAMIC_DISPATCH(table_float)();
}

template <>
const UpdateKernels<double>& update_kernels() {
  return *HWY_DYNAMIC_DISPATCH(table_double)();
}

}  // namespace lockstep::kernels
#endif
