// Other processes that an optimizer's gradients meet, where the strategy has none itself.
#pragma once

#include "gradient/worker_gradients.h"

namespace lockstep {

struct GradientExchange {
  Communicator workers;
  WorkerGradientsOptions options;
  bool sum = false;  // the update is the workers' sum, instead of their mean
};

}  // namespace lockstep
