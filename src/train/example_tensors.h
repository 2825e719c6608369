// The tensors of an Example, of which some may be undefined.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep::train {

// The sizes of an example's tensors, without the batch's: the same program serves all batches with the same ones.
using Shapes = std::vector<std::int64_t>;
Shapes shapes_of(const Example& batch);

// Returns x, y and weight, where the example has them.
std::vector<Tensor> defined_of(const Example& example);

// Returns the first `count` examples.
Example first_of(const Example& batch, std::int64_t count);

}  // namespace lockstep::train
