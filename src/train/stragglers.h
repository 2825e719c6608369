// Finds the worker that the others wait for, and shows where a worker hangs.
#pragma once

#include <span>
#include <string>
#include <thread>
#include <vector>

#include "strategy/strategy_impl.h"

namespace lockstep::train {

// Finds a worker that computes for clearly longer than the others, step after step. Not for GPUs, whose work goes on
// when its calls have returned.
class Stragglers {
 public:
  // Counts a step: `seconds`[rank] is the time of that worker's batch, forward and backward pass, without waiting for
  // others. Returns a sentence where there is a straggler that was not named before; empty else. It needs at most 20
  // steps in which the worker is slow.
  std::string count(std::span<const double> seconds);

  int named() const { return named_; }  // the rank that the last sentence named; -1: there was none

 private:
  std::vector<std::vector<double>> steps_;  // [step][rank], in this window
  int suspect_ = -1;                        // the straggler of the window before; -1: there was none
  int named_ = -1;
};

// Watches the batches while the returned thread lives, where other workers could wait for this one. Where no batch has
// ended for half of the communication's timeout, it logs the stacks of this process's threads, once until a batch ends.
// The stacks of a worker that waits for others show the operation in which it waits.
std::jthread watch_for_hangs(const StrategyImpl& strategy, const std::string& what);

}  // namespace lockstep::train
