// Agreement of all workers on the parts of a launch's batches: the workers run the same program.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/data/dataset.h"

namespace lockstep::programs {

// The sizes of an example's tensors, without the batch's: the same program serves all batches with the same ones.
using Shapes = std::vector<std::int64_t>;
Shapes shapes_of(const Example& batch);

// Returns x, y and weight, where the example has them.
std::vector<Tensor> defined_of(const Example& example);

// Returns the first `count` examples.
Example first_of(const Example& batch, std::int64_t count);

struct LaunchAgreement {
  std::int64_t rows = 0;      // rows of the largest part
  Example row;                // one example, by which smaller parts are filled up
  std::vector<bool> updates;  // [step]: true where it changes variables
};

// name: what is launched ("the training step"), and all that must be the same on all workers. inputs: [replica of this
// worker][step]; parts without examples have shapes too. updates: [step], true where it updates by this worker's
// examples. Collective. Throws InvalidArgument on all workers where their launches or examples' shapes differ, or none
// has an example; Aborted, with that text, on a worker that another told faster. Throws InvalidArgument on this one
// alone where its own shapes differ.
LaunchAgreement agree_on_launch(const Communicator& workers, const std::string& name,
                                const std::vector<std::vector<Example>>& inputs, std::vector<bool> updates);

}  // namespace lockstep::programs
