// Checks the type of the functions that make your modules, with readable compiler errors.
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <type_traits>

#include "lockstep/ops/tensor.h"

namespace torch::nn {
class Module;
}

namespace lockstep::internal {

// The module of a holder (Net, made by TORCH_MODULE), or of a shared pointer.
template <class Holder>
auto module_of(const Holder& holder) {
  if constexpr (requires { holder.ptr(); }) {
    return holder.ptr();
  } else {
    return holder;
  }
}

template <class T>
concept ModuleHolder = requires(const T& holder) {
  std::shared_ptr<torch::nn::Module>(module_of(holder));
};

template <class Factory>
consteval bool makes_modules() {
  constexpr bool is_function = [] {
    if constexpr (ModuleHolder<Factory>)
      return false;  // whose operator() would be tried first, with errors of its own
    else
      return std::is_invocable_v<Factory&>;
  }();
  static_assert(is_function,
                "give a function that makes your module, such as [] { return Net(); }, and not a module: each replica "
                "gets one of its own");
  if constexpr (is_function) {
    constexpr bool makes_holder = ModuleHolder<std::invoke_result_t<Factory&>>;
    static_assert(makes_holder,
                  "the function that makes your module must return a holder (Net, made by TORCH_MODULE) or a "
                  "std::shared_ptr to a class derived from torch::nn::Module");
    return makes_holder;
  }
  return false;
}

// The module that a Factory makes.
template <class Factory>
using ModuleOf = std::remove_reference_t<decltype(*module_of(std::declval<std::invoke_result_t<Factory&>&>()))>;

template <class Factory>
consteval bool makes_tensor_modules() {
  if constexpr (makes_modules<Factory>()) {
    constexpr bool takes_tensor = requires(ModuleOf<Factory> & module, const Tensor& x) {
      { module.forward(x) } -> std::convertible_to<Tensor>;
    };
    static_assert(takes_tensor,
                  "your module's forward must be callable as Tensor forward(Tensor): one input, one output; for any "
                  "other, write a loop of your own with Strategy::replicate and Strategy::run");
    return takes_tensor;
  }
  return false;
}

using MakeModule = std::function<std::shared_ptr<torch::nn::Module>()>;
using ForwardOfModule = std::function<Tensor(torch::nn::Module&, const Tensor&)>;

template <class Factory>
MakeModule maker(const Factory& factory) {
  if constexpr (makes_modules<Factory>()) return [make = factory]() mutable { return module_of(make()); };
  return {};
}

template <class Factory>
ForwardOfModule forward_of() {
  if constexpr (makes_tensor_modules<Factory>()) {
    return [](torch::nn::Module& module, const Tensor& x) -> Tensor {
      return static_cast<ModuleOf<Factory>&>(module).forward(x);
    };
  }
  return {};
}

}  // namespace lockstep::internal
