// Labels that losses leave out of their mean.
#pragma once

#include "lockstep/ops/tensor.h"

namespace lockstep::parallel {

// Throws InvalidArgument where means over the labels of `parts` of a batch do not make up the batch's mean. They do
// where each part has its share of the labels that are not -100, LibTorch's ignore_index. Only labels of int64 are
// examined.
void check_labels_count_alike(const char* caller, const Tensor& target, std::int64_t parts);

}  // namespace lockstep::parallel
