// Other processes whose gradients an optimizer's are summed with, where the strategy has none itself.
#pragma once

#include "gradient/buckets.h"

namespace lockstep {

struct GradientExchange {
  Communicator ranks;
  BucketOptions buckets;
  bool sum = false;  // the update is the processes' sum, instead of their mean
};

}  // namespace lockstep
