// Shows where a worker hangs.
#pragma once

#include <string>
#include <thread>

#include "strategy/strategy_impl.h"

namespace lockstep::train {

// Watches the batches while it lives, where other workers could wait for this one. Where no batch has ended for half of
// the communication's timeout, it logs the stacks of this process's threads, once until a batch ends. The stacks of a
// worker that waits for others show the operation in which it waits.
class HangWatch {
 public:
  HangWatch(const StrategyImpl& strategy, const std::string& what);

 private:
  std::jthread thread_;
};

}  // namespace lockstep::train
