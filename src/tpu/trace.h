// Records what LibTorch's operators do to tensors of the device "tpu", as a program. These tensors have a shape and no
// values.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pjrt/stablehlo.h"

namespace lockstep::tpu {

// While it lives, operators of any thread on tensors that it has made, and on those made of them, are recorded:
// autograd computes gradients on a thread of its own. In-place operators and views do what they always do: LibTorch's
// functionalization turns them into others. One Trace lives at a time; another one waits for its end.
class Trace {
 public:
  // The process's first one must be made before its first backward: then autograd begins its threads, one for each
  // device that it knows. Throws DeviceError where that was not so, or where another library has taken LibTorch's
  // device type PrivateUse1.
  Trace();
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // The next argument of the program.
  at::Tensor argument(at::IntArrayRef sizes, at::ScalarType dtype);

  // The sum of `value` over all replicas.
  at::Tensor all_reduce(const at::Tensor& value, int replicas);

  // The program that computes `outputs`. aliases: as of ProgramText::finish.
  std::string finish(at::TensorList outputs, const std::vector<std::pair<int, int>>& aliases = {}, int replicas = 1);

 private:
  friend class Call;

  pjrt::ProgramText program_;
};

// The device of traced tensors.
at::Device device();

// Of the Trace that lives, among all of the process.
std::int64_t number_of_trace();

}  // namespace lockstep::tpu
