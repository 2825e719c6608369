#include "lockstep/error.h"

#include <cstring>

#include "base/text.h"

namespace lockstep {

DeadlineExceeded::DeadlineExceeded(const std::string& operation, std::chrono::duration<double> waited_for)
    : Error(text(operation, ": gave up after ", waited_for.count(), " s: another rank has not come")),
      operation_(operation),
      waited_for_(waited_for) {}

Interrupted::Interrupted(int signal)
    : Error(text("training was interrupted by ", strsignal(signal), " after a whole step")), signal_(signal) {}

}  // namespace lockstep
