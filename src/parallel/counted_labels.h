// Labels that losses leave out of their mean.
#pragma once

#include "lockstep/ops/tensor.h"

namespace lockstep::parallel {

// Where a batch is divided into `parts` of examples, means over the labels of each make up the batch's only where each
// has its share of the labels that are not -100, LibTorch's ignore_index. Throws InvalidArgument else. Examines labels
// of int64 alone.
void check_labels_count_alike(const char* caller, const Tensor& target, std::int64_t parts);

}  // namespace lockstep::parallel
