#include "tpu/trace.h"

#include <ATen/EmptyTensor.h>
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "lockstep/base/error.h"
#include "ops/tensors.h"

namespace lockstep::tpu {

namespace {

constexpr c10::DispatchKeySet kKeys{c10::DispatchKey::PrivateUse1, c10::DispatchKey::AutogradPrivateUse1};

class TracedTensor final : public c10::TensorImpl {
 public:
  explicit TracedTensor(pjrt::Value value)
      : TensorImpl(kKeys, c10::scalarTypeToTypeMeta(ops::scalar_type_of(value.shape.dtype)), tpu::device()),
        value_(std::move(value)),
        trace_(number_of_trace()) {
    set_sizes_contiguous(value_.shape.sizes);
    set_storage_access_should_throw();  // LibTorch's kernels get an error, and not a null pointer
  }

  const pjrt::Value& value() const { return value_; }
  std::int64_t trace() const { return trace_; }
  void set_value(pjrt::Value value) {
    set_sizes_contiguous(value.shape.sizes);
    value_ = std::move(value);
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allow_change) const override {
    return copy(version, allow_change);
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allow_change) const override {
    return copy(std::move(version), allow_change);
  }

 private:
  template <class Version>
  c10::intrusive_ptr<TensorImpl> copy(Version&& version, bool allow_change) const {
    auto made = c10::make_intrusive<TracedTensor>(value_);
    copy_tensor_metadata(this, made.get(), std::forward<Version>(version), allow_change);
    return made;
  }
  const char* tensorimpl_type_name() const override { return "TracedTensor"; }

  pjrt::Value value_;
  const std::int64_t trace_;
};

const TracedTensor* traced_tensor_of(const at::Tensor& tensor) {
  namespace functional = at::functionalization::impl;
  if (!tensor.defined()) return nullptr;
  if (!functional::isFunctionalTensor(tensor)) return dynamic_cast<const TracedTensor*>(tensor.unsafeGetTensorImpl());
  functional::sync(tensor);  // views of a tensor that was changed in place are made anew
  return dynamic_cast<const TracedTensor*>(functional::from_functional_tensor(tensor).unsafeGetTensorImpl());
}

}  // namespace

at::Tensor traced(pjrt::Value value) { return at::Tensor(c10::make_intrusive<TracedTensor>(std::move(value))); }

void rebind(const at::Tensor& tensor, pjrt::Value value) {
  static_cast<TracedTensor*>(tensor.unsafeGetTensorImpl())->set_value(std::move(value));
}

at::Tensor wrapped(pjrt::Value value) {
  return at::functionalization::impl::to_functional_tensor(traced(std::move(value)));
}

bool is_traced(const at::Tensor& tensor) { return traced_tensor_of(tensor) != nullptr; }

pjrt::Value value_of(const at::Tensor& tensor) {
  const auto* const found = traced_tensor_of(tensor);
  if (found == nullptr) throw InvalidArgument("a tensor that is no value of the traced program");
  if (found->trace() != number_of_trace())
    throw InvalidArgument("a tensor of a traced program that has ended is used in another one");
  return found->value();
}

namespace {

constexpr auto kMeta = c10::DeviceType::Meta;

// A number of host memory stays one, which LibTorch takes beside tensors of any device.
at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || (tensor.dim() == 0 && tensor.device().is_cpu())) return tensor;
  at::Tensor meta(at::detail::empty_meta(tensor.sizes(), tensor.scalar_type()));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

c10::IValue on_meta(const c10::IValue& argument) {
  if (argument.isDevice() && argument.toDevice().type() == device().type()) return c10::Device(kMeta);
  return with_tensors(argument, [](const at::Tensor& tensor) { return on_meta(tensor); });
}

}  // namespace

c10::IValue with_tensors(const c10::IValue& argument, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (argument.isTensor()) return change(argument.toTensor());
  if (argument.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const auto& tensor : argument.toTensorVector()) tensors.push_back(change(tensor));
    return tensors;
  }
  if (argument.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto& tensor : argument.toOptionalTensorVector())
      tensors.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    return tensors;
  }
  return argument;
}

std::string refusal_of(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> arguments) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKeySet(
      {c10::DispatchKey::Functionalize, c10::DispatchKey::AutocastPrivateUse1, c10::DispatchKey::AutocastCPU}));
  torch::jit::Stack stack;
  for (const auto& argument : arguments) stack.push_back(on_meta(argument));
  try {
    operation.callBoxed(&stack);
  } catch (const c10::NotImplementedError&) {
  } catch (const c10::Error& error) {
    std::string refusal = error.what_without_backtrace();
    if (refusal.find("meta") == std::string::npos) return refusal;  // else it needs values
  }
  return "";
}

}  // namespace lockstep::tpu
