// The set of steps that are done; steps are numbered from 0 on.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "parameter_server/push.h"

namespace lockstep::parameter_server {

// The steps that a checkpoint has: those below `end`, of which `updates` were applied.
struct SavedSteps {
  std::int64_t end = 0, updates = 0;
};

// A set of step numbers from 0 on. Steps are applied nearly in order, so memory is needed for those alone that came
// before one that is still missing.
class AppliedSteps {
 public:
  AppliedSteps() = default;

  // Made of the numbers() of another set.
  explicit AppliedSteps(std::span<const std::int64_t> numbers);

  static AppliedSteps saved(const SavedSteps& steps);

  // False where it is there already.
  bool add(std::int64_t step);

  bool contains(std::int64_t step) const { return step < complete_ || later_.contains(step); }
  std::int64_t count() const { return complete_ + static_cast<std::int64_t>(later_.size()) - missing_; }

  // No step below `end` comes any more: those that are not there are taken for done, and do not count.
  void close_below(std::int64_t end);

  // All steps below this one are there, and this one is not.
  std::int64_t complete() const { return complete_; }

  // complete(), and the steps after it, ascending.
  std::vector<std::int64_t> numbers() const;

  void send(StateWriter& to) const;
  static AppliedSteps received(StateReader& from);

 private:
  void advance();

  std::int64_t complete_ = 0;
  std::int64_t missing_ = 0;  // of those below complete_
  std::set<std::int64_t> later_;
};

// The parts of steps that several workers compute together, until there are enough of them.
class StepParts {
 public:
  explicit StepParts(int needed) : needed_(needed) {}

  // Returns the parts of a step once as many as are needed have come, in the order of parts, until `complete` is called
  // for the step; else null. Drops a part that is there already, and one of a complete step.
  const std::vector<Push>* add(Push push);
  void complete(std::int64_t step);

  // All steps below `end` are complete, whatever parts of them have come.
  void complete_below(std::int64_t end);

  // Send the parts to a server with the same shards.
  void send(const PushSizes& sizes, StateWriter& to) const;
  void receive(const PushSizes& sizes, StateReader& from);

 private:
  int needed_;
  std::map<std::int64_t, std::vector<Push>> incomplete_;  // [step], ascending by part
  AppliedSteps complete_;
};

}  // namespace lockstep::parameter_server
