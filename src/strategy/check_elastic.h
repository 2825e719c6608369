// The check of ElasticOptions.
#pragma once

#include <string>

#include "lockstep/strategy/multi_worker_mirrored_strategy.h"

namespace lockstep::strategy {

// Throws InvalidArgument, which begins with the name of the strategy, for an option out of its range.
void check(const std::string& strategy, const ElasticOptions& options);

}  // namespace lockstep::strategy
