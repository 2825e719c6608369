// Whether LibTorch would take an operator's arguments.
#pragma once

#include <ATen/core/stack.h>
#include <ATen/record_function.h>

#include <string>

namespace c10 {
class OperatorHandle;
}

namespace lockstep::tpu {

// Why LibTorch refuses the arguments, in its words, by its kernels for meta tensors, which compute shapes alone; empty
// where it takes them, and for an operator without such a kernel.
std::string refusal_of(const c10::OperatorHandle& operation, c10::ArrayRef<const c10::IValue> arguments);

// While it lives, operators that its thread calls to change a tensor in place are checked before they begin:
// functionalization makes others of them, which may give results of another shape.
class CheckInPlace {
 public:
  CheckInPlace();
  ~CheckInPlace();
  CheckInPlace(const CheckInPlace&) = delete;
  CheckInPlace& operator=(const CheckInPlace&) = delete;

  // Of the last one that was refused, with its name; empty: none was.
  static std::string take_refusal();

 private:
  const at::CallbackHandle callback_;
};

}  // namespace lockstep::tpu
