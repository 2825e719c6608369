// Bringing y_true, y_pred and weights to shapes that fit each other, as Keras does.
#pragma once

#include <optional>
#include <vector>

#include "lockstep/data/dataset.h"
#include "lockstep/ops/tensor.h"

namespace lockstep::train {

// Gives labels [batch] the shape of outputs [batch, 1], and the reverse: broadcasting would make their difference
// [batch, batch].
Tensor with_dimensions_of(const Tensor& y_pred, const Tensor& y_true);

// Returns y_true in y_pred's rank and dtype: a last dimension of size 1 is added or dropped where that makes them
// alike. Throws InvalidArgument naming both shapes when they still differ.
Tensor like_prediction(const char* what, const Tensor& y_true, const Tensor& y_pred);

// Does what like_prediction does, for labels from 0 to 1, up to a rounding of 1e-3. Throws InvalidArgument naming
// another label (checked on the CPU), or the shapes.
Tensor shares_like_prediction(const char* what, const Tensor& y_true, const Tensor& y_pred);

// Throws InvalidArgument for a sample weight that is negative, or not finite; checked on the CPU.
void require_sample_weights(const Tensor& weight);

// Returns labels as int64 in the shape of y_pred without its last dimension. Throws InvalidArgument naming a label that
// is no class of y_pred (checked on the CPU), or the shapes.
Tensor class_labels(const char* what, const Tensor& y_true, const Tensor& y_pred);

// Returns `weight` with as many dimensions as `values`, by new last ones; nothing where it cannot multiply them.
std::optional<Tensor> widened(Tensor weight, const Tensor& values);

// Returns `weight` with as many dimensions as `values`, to multiply both. Throws InvalidArgument naming both shapes.
Tensor weight_like(const Tensor& weight, const Tensor& values);

// Returns two examples of zeros, like those of a batch that may be empty: batch normalization takes no single one.
Example example_like(const Example& batch);

}  // namespace lockstep::train
