// DiLoCo and LocalSGD for a loop of your own: ranks train by themselves for many steps, and meet seldom. For links so
// slow that gradients cannot be sent in each step.
//
//   lockstep::DistributedDataParallel ddp(net, ranks_of_my_site);  // where a site has several ranks
//   lockstep::DiLoCo diloco(net->named_parameters(), ranks_with_my_place_at_all_sites, {.steps = 50});  // on each rank
//
//   adam.step();
//   diloco.step();  // every 50th meets the other sites
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/collective/communicator.h"
#include "lockstep/gradient/diloco_options.h"
#include "lockstep/ops/tensor.h"

namespace torch {
template <class Key, class Value>
class OrderedDict;
}

namespace lockstep {

// Not thread safe. All ranks make the same calls, and train the same parameters.
class DiLoCo {
 public:
  // Gives all ranks rank 0's values. `parameters`: float or double, those that require a gradient are trained.
  // Collective. Throws InvalidArgument for an option out of its range, and where the ranks' options or parameters
  // differ.
  DiLoCo(const torch::OrderedDict<std::string, Tensor>& parameters, Communicator ranks, DiLoCoOptions options = {});

  // Called after each step of the rank's own optimizer. Returns true where all values are those of a meeting that ended
  // now: they have the same bits on all ranks. Throws what the Group throws.
  bool step();

  // A meeting about all parameters now, after any number of steps; running exchanges end first. Collective.
  void meet();

  // Steps so far.
  std::int64_t steps() const;

  // The values of the last meetings, the momentum, what rounding has lost, and the count of steps. Saving and loading
  // are collective. Where the next training has as many ranks it has the same bits. Saving throws InvalidArgument where
  // the ranks' values differ: it is for when step() has returned true, or after meet().
  Trackable trackable() const;

  class Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace lockstep
