// How ranks that train by themselves meet: DiLoCo and LocalSGD. Torch-free.
//
// DiLoCo: Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023.
// LocalSGD: Stich, "Local SGD converges fast and communicates little", ICLR 2019.
// Parts and overlap: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025.
// Names follow torchft's where it has them.
#pragma once

#include <cstdint>
#include <optional>

#include "lockstep/base/buffer.h"

namespace lockstep {

struct DiLoCoOptions {
  std::int64_t steps = 50;  // of each rank, from one meeting about a parameter to the next; at least 1

  // The outer step: stochastic gradient descent with Nesterov's momentum, by the mean over the ranks of how far their
  // values have come since the last meeting.
  double learning_rate = 0.7, momentum = 0.9;

  // DType::bfloat16, or DType::int8 (blocks of 256 with a scale, and error feedback): what is sent of float parameters.
  std::optional<DType> dtype = {};

  // The model in so many parts of about equal size, which meet one after the other, steps / parts apart. Less is sent
  // at once.
  int parts = 1;

  // A part's meeting ends so many steps after it began, and its exchange goes on meanwhile; below steps / parts. Then
  // values become mixing * this rank's + (1 - mixing) * those of the meeting. 0: the step waits for the exchange, and
  // values become those of the meeting.
  std::int64_t overlap = 0;
  double mixing = 0.5;
};

// The options of LocalSGD: at a meeting values become their mean.
inline DiLoCoOptions local_sgd(std::int64_t steps) { return {.steps = steps, .learning_rate = 1, .momentum = 0}; }

}  // namespace lockstep
