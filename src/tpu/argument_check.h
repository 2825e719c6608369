// Tells whether LibTorch would take an operator's arguments.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <string>

namespace c10 {
class OperatorHandle;
}

namespace lockstep::tpu {

// LibTorch's reason to refuse the arguments, in its words, by its kernels for meta tensors, which compute shapes alone.
// Empty where it takes them, and for an operator without such a kernel.
std::string refusal_of(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> arguments);

}  // namespace lockstep::tpu
