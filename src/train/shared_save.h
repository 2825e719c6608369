// A checkpoint that the workers write together while they train on.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "checkpoint/shared_archive.h"
#include "train/model_impl.h"

namespace lockstep::train {

// The full state, or the weights, at one moment. Each worker that sees the chief's folder copies and writes a part of
// the variables and of the optimizer's state. The chief writes the rest.
struct SharedSave {
  std::function<void()> write;                         // this worker's part, in any thread; throws IoError
  std::shared_ptr<checkpoint::SharedArchive> archive;  // the chief's, whose `write` waits for the others; else null

  // Copies what will be written. Collective, between steps. Throws IoError, on all, where the chief cannot begin.
  static SharedSave begin(ModelImpl& impl, const StateFile& file);
};

}  // namespace lockstep::train
