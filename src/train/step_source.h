// The steps of fit's epochs: this process makes them with its peers, or workers make them for a chief.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/train/model.h"

namespace lockstep::train {

// One thread. Each step moves the model's `progress` and `tracker`.
class StepSource {
 public:
  virtual ~StepSource() = default;

  // Returns the steps of an epoch; -1 where the data set does not tell.
  virtual std::int64_t steps_of_an_epoch() = 0;

  // Begins an epoch at the position of `progress`.
  virtual void begin_epoch() = 0;

  // Reads the next step's batch, or waits until others have made a step; false at the end of the epoch's steps, and
  // where the wait was `interrupted`.
  virtual bool next(const std::function<bool()>& interrupted) = 0;

  // Makes the step of which `next` read the batch.
  virtual void train() {}

  // Returns what the processes that make the same step have computed in it, with the sums of `news` at the end.
  // Collective.
  virtual std::vector<double> sum(std::span<const double> news) = 0;

  // Counts the step, with these sums.
  virtual void count(std::span<const double> sums) = 0;

  // Adds logs of the epoch so far, beside those of the model's metrics.
  virtual void add_to(Logs& /*logs*/) const {}

  // A callback has asked for the end: no step begins any more. Those that others have begun come out of `next`.
  virtual void stop() = 0;

  // Returns true where `next` last returned false since it was interrupted.
  virtual bool was_interrupted() const { return false; }

  // Throws InvalidArgument where a callback has `changed` which parameters are trained, and the steps cannot follow.
  virtual void require_known_trainable(bool /*changed*/) const {}
};

std::unique_ptr<StepSource> local_steps(ModelImpl& impl, const Dataset& data, const FitOptions& options);

}  // namespace lockstep::train
