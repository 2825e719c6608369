// What an update changes, as bytes for another worker.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/strategy/replicated.h"

namespace lockstep::train {

// The module's values and buffers, and the optimizer's state.
std::string print_update(const ReplicatedModule& module, const ReplicatedOptimizer& optimizer);
void take_update(const ReplicatedModule& module, const ReplicatedOptimizer& optimizer, const std::string& printed);

// Throws DataError.
Archive parse_state(std::string_view printed);

}  // namespace lockstep::train
