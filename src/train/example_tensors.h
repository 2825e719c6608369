// The tensors of an Example, of which some may be undefined.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep::train {

// Of an example's tensors, without the batch's dimension: the same program serves all batches of one kind.
using Shapes = std::vector<std::int64_t>;
Shapes shapes_of(const Example& batch);

// x, y and weight, where it has them.
std::vector<Tensor> defined_of(const Example& example);

// The first `count` examples.
Example first_of(const Example& batch, std::int64_t count);

}  // namespace lockstep::train
