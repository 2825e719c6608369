// Ranks that come with an optimizer, where the strategy has no workers: they sum gradients, and nothing else is shared.
#pragma once

#include "gradient/buckets.h"

namespace lockstep {

struct GradientExchange {
  Communicator ranks;
  BucketOptions buckets;
  bool sum = false;  // the update is the processes' sum, instead of their mean
};

}  // namespace lockstep
