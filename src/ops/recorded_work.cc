#include "ops/recorded_work.h"

namespace lockstep::ops {

WorkRecorder& work_recorder() {
  static WorkRecorder recorder;
  return recorder;
}

}  // namespace lockstep::ops
