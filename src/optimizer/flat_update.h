// The inner part of the one-pass reduce and update: sums the gradients of a piece of a variable, moves the piece, and
// writes it to every copy. It takes a few kilobytes at a time, so that each byte crosses the memory bus once.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/optimizer/optimizer.h"

namespace lockstep::optimizer {

// A piece of one variable. All arrays have `count` elements.
template <class T>
struct Piece {
  std::span<const T* const> gradients;  // one a source that has a gradient, in rank order; at least one
  std::span<T* const> copies;           // the variable's values; all equal, and equal again afterwards
  std::span<T* const> state;            // as UpdateRule::states()
  std::size_t count = 0;
};

// The rule sees the sum of the gradients after this.
struct GradientScale {
  double divide_by = 1;             // the global batch's weight
  std::optional<double> clipvalue;  // applied after the division
};

// Writes the divided and clipped sum of the gradients to `output`.
template <class T>
void sum_gradients(std::span<const T* const> gradients, const GradientScale& scale, T* output, std::size_t count);

// The whole pass. Does not throw once its few small arrays are there.
template <class T>
void reduce_and_update(const Optimizer& optimizer, const UpdateStep& step, const GradientScale& scale,
                       const Piece<T>& piece);

}  // namespace lockstep::optimizer
