// A training step on a GPU that is recorded and replayed: compile({.jit_compile = true}).
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/data/dataset.h"
#include "ops/recorded_work.h"

namespace lockstep::train {

// The results of forward and backward on one replica's part, besides gradients.
struct ComputedStep {
  Tensor outputs, loss_sum;
  double divisor = 0;  // divisor of the loss
  double weight = 0;   // weight of the gradients, for the update
};

// One thread at a time.
class RecordedStep {
 public:
  // Returns true where a step on `device` is recorded for batches like this one, which may lie elsewhere. Records it
  // after three batches of the same shapes: `compute` enqueues the whole step, update included. Where recording fails,
  // a warning says why, nothing has changed, and nothing is recorded from then on.
  bool serves(const Example& part, c10::Device device, const std::function<ComputedStep(const Example&)>& compute);

  // Replays the recorded step for `part`.
  ComputedStep play(const Example& part);

  const Example& input() const { return input_; }  // the last play's part, on the device

 private:
  void record(const Example& part, c10::Device device, const std::function<ComputedStep(const Example&)>& compute);
  void give_up(const char* reason);

  static constexpr int kStepsBefore = 3;  // warm-up: LibTorch chooses algorithms and allocates memory

  std::vector<std::int64_t> shape_;  // of the batches that came last
  int seen_ = 0;                     // batches of that shape
  bool failed_ = false;
  Example input_;        // the recorded step reads it
  ComputedStep result_;  // the recorded step writes it
  std::unique_ptr<ops::RecordedWork> work_;
};

}  // namespace lockstep::train
