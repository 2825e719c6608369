#include "cli/commands.h"

namespace lockstep::cli {

std::string find_tpu() {
  return "none (this build has no TPUStrategy: pjrt_c_api.h was not found, or LOCKSTEP_TPU was off, when it was "
         "configured)";
}

}  // namespace lockstep::cli
