#include "tpu/argument_check.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

#include "tpu/trace.h"

namespace lockstep::tpu {
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
  if (argument.isTensor()) return on_meta(argument.toTensor());
  if (argument.isDevice() && argument.toDevice().type() == device().type()) return c10::Device(kMeta);
  if (argument.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const auto& tensor : argument.toTensorVector()) tensors.push_back(on_meta(tensor));
    return tensors;
  }
  if (argument.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto& tensor : argument.toOptionalTensorVector())
      tensors.push_back(tensor ? std::optional(on_meta(*tensor)) : std::nullopt);
    return tensors;
  }
  return argument;
}

}  // namespace

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
