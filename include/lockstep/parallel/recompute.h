// Recomputation of activations: backward runs a module's forward again, in place of keeping what it computed (Chen et
// al. 2016). Follows torch.utils.checkpoint.checkpoint.
//
//   for (const auto& block : blocks) x = lockstep::recompute(block, x);
#pragma once

#include "lockstep/ops/tensor.h"
#include "lockstep/strategy/module_factory.h"

namespace lockstep {

namespace internal {

Tensor recompute(const std::shared_ptr<torch::nn::Module>& module, const ForwardOfModule& forward, const Tensor& x);

}  // namespace internal

// module(x), a module holder or a shared_ptr to a module with `Tensor forward(Tensor)`, of which only x is kept for
// backward. Its second forward has the random numbers, the modes (train, eval) and the values of buffers of the first
// one, so it computes the same. The second forward leaves buffers, such as BatchNorm's running statistics, as they are;
// other state that a module changes in its forward changes twice. Hooks on its parameters' gradients are called once.
// Cannot be differentiated twice. Throws InvalidArgument for a module that changes its input in place. Backward throws
// it where parameters were changed since the first forward. It does so too where the module uses another tensor that
// requires gradients, such as a parameter of another module. Any thread; the module must not be used by two at a time.
template <class Holder>
requires internal::ModuleHolder<Holder> Tensor recompute(const Holder& module, const Tensor& x) {
  const auto pointer = internal::module_of(module);
  using Module = std::remove_reference_t<decltype(*pointer)>;
  return internal::recompute(
      pointer,
      [](torch::nn::Module& of, const Tensor& input) -> Tensor { return static_cast<Module&>(of).forward(input); }, x);
}

}  // namespace lockstep
