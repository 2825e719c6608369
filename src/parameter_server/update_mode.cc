#include "parameter_server/update_mode.h"

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {

void check(const UpdateMode& mode) {
  if (mode.parts < 1) throw InvalidArgument(text("a step has ", mode.parts, " parts; it must be at least 1"));
  if (mode.needed < 1 || mode.needed > mode.parts) {
    throw InvalidArgument(
        text(mode.needed, " of ", mode.parts, " parts of a step are needed; it must be from 1 to ", mode.parts));
  }
}

}  // namespace lockstep::parameter_server
