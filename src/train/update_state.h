// What an update changes, as bytes for another worker.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/strategy/replicated.h"

namespace lockstep::train {

// For a worker that lacks the update: the module's values and buffers, and the optimizer's state. Where that completes
// it by itself, its counters alone.
std::string print_update(const ReplicatedModule& module, const ReplicatedOptimizer& optimizer);
void take_update(const ReplicatedModule& module, const ReplicatedOptimizer& optimizer, const std::string& printed);

// For a newcomer: what does not come with GradientPath::regroup.
void save_for_newcomer(const ReplicatedModule& module, const ReplicatedOptimizer& optimizer, Archive& archive);
std::function<void()> load_of_newcomer(const ReplicatedModule& module, const ReplicatedOptimizer& optimizer,
                                       const Archive& archive);

// Throws DataError.
Archive parse_state(std::string_view printed);

}  // namespace lockstep::train
