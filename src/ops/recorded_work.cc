#include "ops/recorded_work.h"

namespace lockstep {

WorkRecorder& work_recorder() {
  static WorkRecorder recorder;
  return recorder;
}

}  // namespace lockstep
