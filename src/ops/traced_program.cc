#include "ops/traced_program.h"

#include "ops/parameter_hook.h"

namespace lockstep::ops {
namespace {

StepTrace* current = nullptr;  // for its thread, and autograd's, which compute for it: those that see its OperatorMode

}  // namespace

StepTrace* current_trace() { return current != nullptr && has_operator_mode() ? current : nullptr; }

UseTrace::UseTrace(StepTrace& trace) { current = &trace; }
UseTrace::~UseTrace() { current = nullptr; }

OpenProgramDevices& open_program_devices() {
  static OpenProgramDevices open;
  return open;
}

}  // namespace lockstep::ops
