// For tests: every rule, and every kind of clipping.
#pragma once

#include <vector>

#include "lockstep/optimizer/optimizer.h"

namespace lockstep::gradient {

struct NamedOptimizer {
  const char* name;
  Optimizer optimizer;
};

inline std::vector<NamedOptimizer> optimizers() {
  return {{"sgd", SGD({.learning_rate = 0.05})},
          {"momentum", SGD({.learning_rate = 0.02, .momentum = 0.9})},
          {"nesterov, clipvalue", SGD({.learning_rate = 0.02, .momentum = 0.9, .nesterov = true, .clipvalue = 0.1})},
          {"adam", Adam({.learning_rate = 0.01, .epsilon = 1e-3})},
          {"adam, clipnorm", Adam({.learning_rate = 0.01, .epsilon = 1e-3, .clipnorm = 0.3})},
          {"adamw, global clipnorm", AdamW({.learning_rate = 0.01, .epsilon = 1e-3, .global_clipnorm = 0.5})},
          {"rmsprop", RMSprop({.learning_rate = 0.01, .momentum = 0.5, .epsilon = 1e-3, .centered = true})},
          {"adagrad", Adagrad({.learning_rate = 0.05})}};
}

}  // namespace lockstep::gradient
