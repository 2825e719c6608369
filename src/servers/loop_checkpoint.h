// Checkpoints of the state that parameter servers have of a custom loop's optimizer.
#pragma once

#include <memory>

#include "lockstep/checkpoint/checkpoint.h"
#include "strategy/strategy_impl.h"

namespace lockstep::servers {

// Makes files with the variables, the optimizer's state and the rows of tables, in a checkpoint of its own. The servers
// write it, and restore their shards from it when they are started again. For the chief; throws InvalidArgument
// elsewhere, and while scheduled steps have not finished.
Trackable::Files files_of_loop(std::shared_ptr<StrategyImpl> strategy, std::shared_ptr<GradientPath> gradients);

}  // namespace lockstep::servers
