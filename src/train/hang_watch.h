// Says where a worker hangs.
#pragma once

#include <string>
#include <thread>

#include "strategy/strategy_impl.h"

namespace lockstep::train {

// While it lives, and other workers could wait for this one: where no batch has ended for half of the timeout of their
// communication, the stacks of this process's threads are logged, once until one ends. Those of a worker that waits for
// others show the operation in which it does.
class HangWatch {
 public:
  HangWatch(const StrategyImpl& strategy, const std::string& what);

 private:
  std::jthread thread_;
};

}  // namespace lockstep::train
