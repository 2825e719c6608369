// The state that an update changes, as bytes for another worker.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/strategy/replicated.h"

namespace lockstep::train {

// Print and take an update, for a worker that lacks it: the module's values and buffers, and the optimizer's state.
// Where the optimizer completes its state by itself, only its counters are printed.
std::string print_update(const ReplicatedModule& module, const ReplicatedOptimizer& optimizer);
void take_update(const ReplicatedModule& module, const ReplicatedOptimizer& optimizer, const std::string& printed);

// Save and load the state of a newcomer that GradientPath::regroup does not bring.
void save_for_newcomer(const ReplicatedModule& module, const ReplicatedOptimizer& optimizer, Archive& archive);
std::function<void()> load_of_newcomer(const ReplicatedModule& module, const ReplicatedOptimizer& optimizer,
                                       const Archive& archive);

// Parses the bytes of a state. Throws DataError.
Archive parse_state(std::string_view printed);

}  // namespace lockstep::train
