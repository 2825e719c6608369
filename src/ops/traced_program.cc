#include "ops/traced_program.h"

namespace lockstep::ops {
namespace {

thread_local StepTrace* current = nullptr;

}  // namespace

StepTrace* current_trace() { return current; }

UseTrace::UseTrace(StepTrace& trace) { current = &trace; }
UseTrace::~UseTrace() { current = nullptr; }

OpenProgramDevices& open_program_devices() {
  static OpenProgramDevices open;
  return open;
}

}  // namespace lockstep::ops
