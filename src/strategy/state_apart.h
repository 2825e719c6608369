// The part of a checkpoint that is of workers that train by themselves (DiLoCo): each worker's state of the optimizer,
// and their outer step.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "gradient/gradient_path.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::strategy {

// Calls visit(name, slot, index), with names after `prefix`, for each state of each parameter.
using EachState = std::function<void(const std::string& prefix,
                                     const std::function<void(const std::string&, std::size_t, std::size_t)>& visit)>;

// Require gradients.outer_step(). Collective over the workers.
void save_apart(const GradientPath& gradients, const EachState& each_state, Archive& archive,
                const std::string& prefix);

// Returns the change; null where the checkpoint is of workers that did not train apart. Where it is of as many workers,
// each takes its own state; else the outer step alone, and the chief's state, which is loaded elsewhere.
std::function<void()> load_apart(GradientPath& gradients, const EachState& each_state, const Archive& archive,
                                 const std::string& prefix);

}  // namespace lockstep::strategy
