// Hooks on a leaf's gradient that only look at it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

namespace lockstep::ops {

// Calls `watch` with each gradient that backward has for a leaf. Unlike a user's hook it keeps no gradient and changes
// none, so that gradients may still be written where they are sent from, and be computed later.
class WatchingHook final : public torch::autograd::FunctionPreHook {
 public:
  using Watch = std::function<void(const at::Tensor& gradient)>;

  static void add(const at::Tensor& leaf, Watch watch) {
    auto hook = std::make_unique<WatchingHook>(std::move(watch));
    const bool has_some =
        torch::autograd::impl::get_autograd_meta(leaf) != nullptr && !torch::autograd::impl::hooks(leaf).empty();
    if (has_some) {
      torch::autograd::impl::hooks(leaf).push_back(std::move(hook));
    } else {
      torch::autograd::impl::add_hook(leaf, std::move(hook));  // which asserts that there is none yet
    }
  }

  explicit WatchingHook(Watch watch) : watch_(std::move(watch)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    if (gradients[0].defined()) watch_(gradients[0]);
    return gradients;
  }

 private:
  Watch watch_;
};

// As leaf.register_hook, of which LibTorch's first call on a leaf drops the other hooks.
template <class Hook>
unsigned register_hook_beside_others(const at::Tensor& leaf, Hook hook) {
  auto& hooks = torch::autograd::impl::hooks(leaf);
  auto kept = std::exchange(hooks, {});
  const auto number = leaf.register_hook(std::move(hook));
  for (auto& each : kept) hooks.push_back(std::move(each));
  return number;
}

// True where a hook may keep or change the leaf's gradient.
inline bool may_keep_gradient(const at::Tensor& leaf) {
  const auto& hooks = torch::autograd::impl::hooks(leaf);
  return std::any_of(hooks.begin(), hooks.end(),
                     [](const auto& hook) { return dynamic_cast<const WatchingHook*>(hook.get()) == nullptr; });
}

}  // namespace lockstep::ops
