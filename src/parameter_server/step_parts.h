// The parts of steps that several workers compute together, until there are enough of them.
#pragma once

#include <map>
#include <vector>

#include "parameter_server/applied_steps.h"
#include "parameter_server/kept_push.h"

namespace lockstep::parameter_server {

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
