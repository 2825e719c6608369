// What the parts of the batches of one launch have in common, on all workers: these run the same program.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/data/dataset.h"

namespace lockstep::train {

// Of an example's tensors, without the batch's dimension: the same program serves all batches of one kind.
using Shapes = std::vector<std::int64_t>;
Shapes shapes_of(const Example& batch);

// The example's tensors: x, y and weight, where it has them.
std::vector<Tensor> defined_of(const Example& example);

// The first `count` examples.
Example first_of(const Example& example, std::int64_t count);

struct LaunchAgreement {
  std::int64_t rows = 0;      // of the largest part
  Example row;                // one example, by which smaller parts are filled up
  std::vector<bool> updates;  // [step]: whether it changes variables
};

// inputs: [replica of this worker][step], of which parts without examples have shapes as well. updates: whether a step
// does by this worker's examples. Collective over the workers. Throws InvalidArgument, on all workers, where their
// examples have different shapes, or none has an example; and on this one where its own have different shapes.
LaunchAgreement agree_on_launch(const Communicator& workers, const std::vector<std::vector<Example>>& inputs,
                                std::vector<bool> updates);

}  // namespace lockstep::train
