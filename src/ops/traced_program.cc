#include "ops/traced_program.h"

#include "base/process.h"
#include "lockstep/base/device_error.h"
#include "ops/parameter_hook.h"

namespace lockstep::ops {

namespace {

StepTrace* current = nullptr;  // for its thread, and autograd's, which compute for it: those that see its OperatorMode

}  // namespace

StepTrace* current_trace() { return current != nullptr && has_operator_mode() ? current : nullptr; }

void set_current_trace(StepTrace* trace) { current = trace; }

const OpenProgramDevices& open_program_devices() {
  static const OpenProgramDevices* const open = function_of_plugin<DeviceError, const OpenProgramDevices*()>(
      {"tpu", "TPUs", "LOCKSTEP_TPU"}, "lockstep_open_program_devices")();
  return *open;
}

WorkRecorder& work_recorder() {
  static WorkRecorder recorder;
  return recorder;
}

}  // namespace lockstep::ops
