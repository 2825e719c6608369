// Records what LibTorch's operators do to tensors of the device "tpu", as a program. These tensors have a shape and no
// values.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tpu/pjrt/stablehlo.h"

namespace c10 {
class OperatorHandle;
}

namespace lockstep::tpu {

// Returns the tensor that operators' kernels get and return, without the wrapper of LibTorch's functionalization.
at::Tensor traced(pjrt::Value value);

// Returns the tensor that programs get, in that wrapper.
at::Tensor wrapped(pjrt::Value value);

// Throws InvalidArgument where `tensor` is none of the two, or of a Trace that has ended.
pjrt::Value value_of(const at::Tensor& tensor);
bool is_traced(const at::Tensor& tensor);

// From now on the tensor, which is not wrapped, stands for another value of its dtype.
void rebind(const at::Tensor& tensor, pjrt::Value value);

// Returns the argument of an operator with each tensor, also those of a list, replaced by what `change` makes of it.
c10::IValue with_tensors(const c10::IValue& argument, const std::function<at::Tensor(const at::Tensor&)>& change);

// LibTorch's reason to refuse the arguments, in its words, by its kernels for meta tensors, which compute shapes alone.
// Empty where it takes them, and for an operator without such a kernel.
std::string refusal_of(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> arguments);

// While a Trace lives, operators on its tensors, and on those made of them, are recorded: of its thread, and of
// autograd's while its thread waits for gradients. In-place operators and views work as always: LibTorch's
// functionalization turns them into others. A Trace ends on its thread. One lives at a time in the process.
class Trace {
 public:
  // `for_cpu`: of the program. Operators may have another lowering for CPUs, where XLA has other strengths.
  //
  // The process's first Trace must be made before the first backward, with which autograd begins its threads. Throws
  // DeviceError where it was not, or another library has taken LibTorch's device type PrivateUse1; Error where a Trace
  // lives.
  explicit Trace(bool for_cpu = true);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // The next argument of the program.
  at::Tensor argument(at::IntArrayRef sizes, at::ScalarType dtype);

  // Reduce over all replicas by "stablehlo.add", "stablehlo.maximum", ...; and gather values of all along `axis`.
  std::vector<at::Tensor> all_reduce(std::string_view operation, const std::vector<at::Tensor>& values, int replicas);
  at::Tensor all_gather(const at::Tensor& value, std::int64_t axis, int replicas);

  // Uniform random words, the same for the same seed, which is an argument of the program: two int32. Each call gives
  // others. As of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), Threefry-2x32 with 20 rounds.
  pjrt::Value random_words(std::int64_t count);
  std::optional<int> seed_argument() const { return seed_argument_; }

  // LibTorch's operators so far, by name, in their order.
  const std::vector<std::string>& operators() const { return operators_; }

  // The place of `tensor`, an argument, among the program's; and whether it is one still, and not another value.
  int arguments() const { return static_cast<int>(program_.arguments().size()); }
  int number_of_argument(const at::Tensor& tensor) const;
  at::Tensor argument_again(int number) const;  // as it was
  bool is_argument(const at::Tensor& tensor, int number) const;

  // The program that computes `outputs`. The other arguments are those of ProgramText::finish; a program of 1 step has
  // no loop.
  std::string finish(at::TensorList outputs, const std::vector<std::pair<int, int>>& aliases = {}, int replicas = 1,
                     int steps = 1, const std::vector<bool>& stacked = {});

 private:
  friend class Call;

  const bool for_cpu_;
  pjrt::ProgramText program_;
  std::optional<int> seed_argument_;
  std::int32_t draws_ = 0;
  std::vector<std::string> operators_;  // so far, by name
};

// The device of traced tensors.
at::Device device();

// The number of the Trace that lives, among all of the process.
std::int64_t number_of_trace();

}  // namespace lockstep::tpu
