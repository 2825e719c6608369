// Hooks on the operators that take a parameter: how Lockstep acts inside modules whose code it does not know. C++
// modules have no forward hooks, and their members cannot be replaced from outside.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace lockstep::ops {

// The place where an operator takes a tensor: an argument, or an element of an argument that is a list.
struct ArgumentPlace {
  std::size_t index = 0;
  std::optional<std::size_t> element = {};
};

// An operator of LibTorch and its arguments, which a hook may replace.
class OperatorCall {
 public:
  OperatorCall(const c10::OperatorHandle& op, torch::jit::Stack& stack);

  const std::string& name() const { return op_.schema().name(); }  // such as "aten::linear"
  std::size_t arguments() const { return count_; }
  c10::IValue& argument(std::size_t i) const { return stack_[stack_.size() - count_ + i]; }

  // The argument, where it is a tensor; else undefined.
  at::Tensor tensor(std::size_t i) const;
  at::Tensor tensor(const ArgumentPlace& place) const;
  void replace(const ArgumentPlace& place, at::Tensor tensor) const;

  // The argument of that name, or none.
  std::optional<c10::IValue> named(const char* name) const;

  // True where the operator makes each element of its result from the elements at the same place, as LibTorch's tags
  // say.
  bool is_pointwise() const;

  // True where the operator changes the argument in place.
  bool writes(std::size_t i) const;

  // True where the operator reads values of its arguments: all but views do.
  bool reads() const;

  // Counts the calls with hooks of this thread.
  std::uint64_t number() const { return number_; }

  // True where the call gives the first argument other memory: by Tensor::set_data, as Module::to does, or by set_, as
  // torch::load does. The argument's hooks stay.
  bool is_set_data() const;
  bool is_set_storage() const;

  const c10::FunctionSchema& schema() const { return op_.schema(); }

  // Leaves `result` in the place of the arguments.
  void finish(at::Tensor result) const;

  // The only result, after again().
  at::Tensor result() const { return stack_.back().toTensor(); }
  void set_result(at::Tensor result) const { stack_.back() = std::move(result); }

  // Calls the operator with its arguments as they are now, which may be of another device than they were.
  void again() const { op_.callBoxed(&stack_); }

 private:
  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const std::size_t count_;
  const std::uint64_t number_;
};

// Called in forward and in backward, in the thread that called the operator, to which it throws. Operators that a hook
// calls do not go through hooks. Parameters and threads may share a hook.
class ParameterHook {
 public:
  virtual ~ParameterHook() = default;

  // Called before an operator runs whose argument `i` is the parameter or a view of it; for each parameter with hooks
  // that the operator takes.
  virtual void before(const OperatorCall& /*call*/, std::size_t /*i*/) {}

  // Called then: carries out the operator in another way, ending with call.finish, and returns true; else does nothing.
  // The first hook that returns true decides.
  virtual bool run(const OperatorCall& /*call*/, std::size_t /*i*/) { return false; }

  // Called last, where no hook has carried out the operator: the hook may replace the argument at `place`, which may be
  // an element of a list. The hook may also carry out the operator, and return true.
  virtual bool otherwise(const OperatorCall& /*call*/, const ArgumentPlace& /*place*/) { return false; }
};

// While one lives, all operators that its thread calls, and backwards that the thread calls, come to `see` first.
// Operators that `see` calls do not. One lives at a time in the process.
class OperatorMode {
 public:
  // `see` carries out the operator, and returns true; else it does nothing.
  using See = std::function<bool(const OperatorCall& call)>;

  explicit OperatorMode(See see);
  ~OperatorMode();
  OperatorMode(const OperatorMode&) = delete;
  OperatorMode& operator=(const OperatorMode&) = delete;

 private:
  c10::impl::IncludeDispatchKeyGuard guard_;
};

// True where operators of this thread go through an OperatorMode.
bool has_operator_mode();

// From now on operators that take `parameter`, or a view of it, go through `hook` as well. The parameter stays the same
// tensor for all who have it.
void add_hook(const at::Tensor& parameter, std::shared_ptr<ParameterHook> hook);

// The hooks of a parameter, in the order in which they were added.
std::vector<std::shared_ptr<ParameterHook>> hooks_of(const at::Tensor& parameter);

// The first hook of a parameter that is a `Hook`; null where there is none.
template <class Hook>
std::shared_ptr<Hook> hook_of(const at::Tensor& parameter) {
  for (const auto& each : hooks_of(parameter)) {
    if (auto hook = std::dynamic_pointer_cast<Hook>(each)) return hook;
  }
  return nullptr;
}

// True where operators that this thread calls now with the tensor go through hooks.
bool has_hooks(const at::Tensor& tensor);

// True where the parameter has memory: not where fully_shard has given it up.
bool has_values(const at::Tensor& parameter);

// True where this thread is in a backward.
bool in_backward();

// Code that reads a parameter's memory itself makes one first: the parameter's values are then there, as for an
// operator that reads it. While this lives, operators of this thread do not go through hooks: they see a divided
// parameter's part.
class WithoutHooks {
 public:
  explicit WithoutHooks(const at::Tensor& parameter);

 private:
  std::optional<c10::impl::ExcludeDispatchKeyGuard> guard_;
};

}  // namespace lockstep::ops
