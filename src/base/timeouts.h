// How long what is waited for.
#pragma once

#include "lockstep/base/deadline.h"

namespace lockstep {

// A value, in seconds. Options of users are put into one where a strategy, or Horovod, begins.
struct Timeouts {
  double start = kStartTimeoutSeconds;      // until all processes have come, and until these have made a Group
  double step = kDefaultTimeoutSeconds;     // a replica's wait for others in a step, and a collective call
  double regroup = kRegroupTimeoutSeconds;  // after a loss: until those that remain have come, and have made a Group
  double lost_host = kLostHostSeconds;      // a host that does not answer for so long is lost
};

}  // namespace lockstep
