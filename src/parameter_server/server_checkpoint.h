// Checkpoints of a model on servers, as the chief makes and restores them. The servers write their shards without
// stopping the workers, and the chief's file, which lists theirs, is written last.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "lockstep/checkpoint/checkpoint.h"
#include "parameter_server/client.h"
#include "parameter_server/coordinator.h"

namespace lockstep::parameter_server {

// Writes the checkpoint of the moment between two steps that comes next: workers go on meanwhile. `own_state()`: what
// the chief has beside the shards. `write_values()` writes those of a model that has not been trained, where a server
// has lost them. Replaces the checkpoint at `path` whole or not at all. Throws as wait_for_step, what
// calls to servers throw, and IoError.
void write_checkpoint(Coordinator& coordinator, const Client& client, const std::string& path,
                      const std::function<Archive()>& own_state, const std::function<void()>& write_values,
                      Deadline deadline);

// As write_checkpoint, for a model whose steps a program schedules. Throws as StepQueue::end_of_finished.
SavedSteps write_loop_checkpoint(StepQueue& steps, const Client& client, const std::string& path,
                                 const std::function<void()>& write_values, Deadline deadline);

// Return where the steps of a checkpoint end, and how many updates they made; also without servers.
Coordinator::Finished steps_of(const Archive& main);
SavedSteps saved_steps_of(const Archive& main);

// Its number among the models of the program; nothing where it was made without servers.
std::optional<std::int64_t> model_of(const Archive& main);

}  // namespace lockstep::parameter_server
