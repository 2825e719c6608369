// The arithmetic of the optimizers and of the one-pass reduce and update, on plain arrays.
#pragma once

#include <cstddef>

namespace lockstep::kernels {

struct MomentumCoefficients {
  double rate, momentum;
  bool nesterov;
};

struct AdamCoefficients {
  double rate;  // with both bias corrections in it
  double one_minus_beta_1, one_minus_beta_2, epsilon;
};

struct RMSpropCoefficients {
  double rate, rho, momentum, epsilon;
};

// Functions for the processor at hand. All arrays of a call have `count` elements and do not overlap. Any thread may
// call.
template <class T>
struct UpdateKernels {
  // output = factor * (inputs[0] + inputs[1] + ...), added in that order; n_inputs >= 1
  void (*scaled_sum)(const T* const* inputs, std::size_t n_inputs, T factor, T* output, std::size_t count);

  // Summed in double, in an order that depends on count alone.
  double (*sum_of_squares)(const T* values, std::size_t count);

  void (*scale)(T* values, T factor, std::size_t count);
  void (*clip)(T* values, T bound, std::size_t count);

  // value -= rate * gradient
  void (*sgd)(T* value, const T* gradient, T rate, std::size_t count);

  void (*sgd_momentum)(T* value, const T* gradient, T* velocity, const MomentumCoefficients& c, std::size_t count);

  // `largest` is amsgrad's running maximum of v, or null.
  void (*adam)(T* value, const T* gradient, T* m, T* v, T* largest, const AdamCoefficients& c, std::size_t count);

  // `mean` (centered) and `velocity` (momentum > 0) may be null.
  void (*rmsprop)(T* value, const T* gradient, T* square, T* mean, T* velocity, const RMSpropCoefficients& c,
                  std::size_t count);

  // accumulator += gradient^2; value -= rate * gradient / sqrt(accumulator + epsilon)
  void (*adagrad)(T* value, const T* gradient, T* accumulator, T rate, T epsilon, std::size_t count);
};

// T is float or double.
template <class T>
const UpdateKernels<T>& update_kernels();

}  // namespace lockstep::kernels
