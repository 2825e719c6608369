#include "tpu/traced_tensor.h"

#include <ATen/FunctionalTensorWrapper.h>

#include "lockstep/base/error.h"
#include "ops/dtypes.h"
#include "tpu/trace.h"

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

}  // namespace lockstep::tpu
