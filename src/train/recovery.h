// How fit goes on when workers are lost.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "train/model_impl.h"

namespace lockstep::train {

// A fit is a sequence of sections that all workers complete together: a step, an evaluation, an agreement. When one is
// lost, some of the others may have completed the section in which that happened, and some not; and of those in a step,
// some may have made its update. After they have regrouped, what one of them has completed the others take from it, and
// what none has is done again. Since gradients are applied only when all sums are there, no step has to be taken back.
//
// One thread, while no replica runs.
class Recovery {
 public:
  // `on_chief_lost`: called where this worker has become the chief.
  Recovery(ModelImpl& impl, std::function<void()> on_chief_lost)
      : impl_(impl), on_chief_lost_(std::move(on_chief_lost)) {}

  // A section: act() is collective and returns numbers that are equal on all workers; finish(numbers) is not
  // collective, and completes the section. Where act() fails since a worker was lost, it is called again on those that
  // remain; or only `finish`, with the numbers of one that has completed the section. Where the strategy is not
  // elastic, both are called once.
  using Numbers = std::vector<double>;
  void run(const std::function<Numbers()>& act, const std::function<void(const Numbers& numbers)>& finish);

  // Whether the section's update of the model has been made, here or on another worker, from which this one has got the
  // state then. Set by act(); false when a section begins.
  bool updated = false;

  // After an exception outside of a section, in what is not done again: where it is the loss of a worker with which fit
  // can go on, goes on behind it, with a warning that names `what`. Else false.
  bool goes_on_behind(const std::exception& error, const std::string& what);

 private:
  struct Report;  // of a worker, on where it was
  void begin();
  bool is_loss(const std::exception& error, std::vector<int>& lost) const;
  bool recover(std::vector<int> lost, const std::function<void(const Numbers&)>& finish);
  bool regroup(std::vector<int> lost, const std::function<void(const Numbers&)>& finish);
  Numbers share(const Numbers& numbers, int from) const;
  void share_state(const std::vector<Report>& reports);

  ModelImpl& impl_;
  const std::function<void()> on_chief_lost_;
  std::int64_t completed_ = 0;                             // sections
  Numbers last_;                                           // of the last one
  std::int64_t steps_before_ = 0, iterations_before_ = 0;  // the section
};

}  // namespace lockstep::train
