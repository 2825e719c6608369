// What the parts of the batches of one launch have in common, on all workers: these run the same program.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/data/dataset.h"

namespace lockstep::train {

struct LaunchAgreement {
  std::int64_t rows = 0;      // of the largest part
  Example row;                // one example, by which smaller parts are filled up
  std::vector<bool> updates;  // [step]: whether it changes variables
};

// name: of what is launched ("the training step"), and all that must be the same for it on all workers. inputs:
// [replica of this worker][step], of which parts without examples have shapes as well. updates: whether a step does by
// this worker's examples. Collective over the workers. Throws InvalidArgument, on all workers, where they launch
// something else, their examples have different shapes, or none has an example (Aborted, with that text, on one that
// another was faster to tell); and on this one where its own have different shapes.
LaunchAgreement agree_on_launch(const Communicator& workers, const std::string& name,
                                const std::vector<std::vector<Example>>& inputs, std::vector<bool> updates);

}  // namespace lockstep::train
