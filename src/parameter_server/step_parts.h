// The parts of steps that several workers compute together, until there are enough of them.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "parameter_server/applied_steps.h"
#include "parameter_server/push.h"

namespace lockstep::parameter_server {

class StepParts {
 public:
  explicit StepParts(int needed) : needed_(needed) {}

  // Once as many parts of a step have come as are needed: these, in the order of parts. A part that is there already,
  // and one of a step that was complete, is dropped.
  std::optional<std::vector<Push>> add(Push push);

 private:
  const int needed_;
  std::map<std::int64_t, std::map<int, Push>> incomplete_;  // [step][part]
  AppliedSteps complete_;
};

}  // namespace lockstep::parameter_server
