// Hooks on a leaf's gradient that only look at it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace lockstep::ops {

// Calls `watch` with each gradient that backward has for a leaf. Unlike a user's hook it keeps no gradient and changes
// none, so that gradients may still be written where they are sent from, and be computed later.
class WatchingHook final : public torch::autograd::FunctionPreHook {
 public:
  using Watch = std::function<void(const at::Tensor& gradient)>;

  // A leaf's first register_hook drops its other hooks, so that LibTorch's list of hooks is made here.
  static void add(const at::Tensor& leaf, Watch watch) {
    const auto* const meta = torch::autograd::impl::get_autograd_meta(leaf);
    if (meta == nullptr || !meta->cpp_hooks_list_) torch::autograd::impl::create_cpp_hook(leaf);
    torch::autograd::impl::hooks(leaf).push_back(std::make_unique<WatchingHook>(std::move(watch)));
  }

  explicit WatchingHook(Watch watch) : watch_(std::move(watch)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    if (gradients[0].defined()) watch_(gradients[0]);
    return gradients;
  }

 private:
  Watch watch_;
};

// While this lives, backwards of this thread call no hooks of the leaves' gradients. For a backward inside of another
// one, which hands its gradients to the outer one's leaves: the hooks are called there.
class WithoutGradientHooks {
 public:
  explicit WithoutGradientHooks(const std::vector<at::Tensor>& leaves) : outer_(std::exchange(innermost(), this)) {
    for (const auto& leaf : leaves) {
      if (torch::autograd::impl::get_autograd_meta(leaf) == nullptr) continue;
      if (auto& hooks = torch::autograd::impl::hooks(leaf); !hooks.empty())
        hidden_.emplace_back(leaf, std::exchange(hooks, {}));
    }
  }
  ~WithoutGradientHooks() {
    for (auto& [leaf, hooks] : hidden_) std::swap(torch::autograd::impl::hooks(leaf), hooks);
    innermost() = outer_;
  }
  WithoutGradientHooks(const WithoutGradientHooks&) = delete;
  WithoutGradientHooks& operator=(const WithoutGradientHooks&) = delete;

 private:
  friend bool may_keep_gradient(const at::Tensor& leaf);
  using Hooks = std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>;

  static WithoutGradientHooks*& innermost() {
    thread_local WithoutGradientHooks* guard = nullptr;
    return guard;
  }

  WithoutGradientHooks* const outer_;
  std::vector<std::pair<at::Tensor, Hooks>> hidden_;
};

// True where a hook may keep or change the leaf's gradient, also one that waits for an outer backward.
inline bool may_keep_gradient(const at::Tensor& leaf) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(leaf);
  if (meta == nullptr) return false;
  // One of the hooks calls those of register_hook, which may all have been removed.
  const auto& list = meta->cpp_hooks_list_;
  const bool has_list = list != nullptr;
  if (has_list && std::any_of(list->begin(), list->end(), [](const auto& each) { return each != nullptr; }))
    return true;
  const auto others = [](const WithoutGradientHooks::Hooks& hooks) {
    return std::count_if(hooks.begin(), hooks.end(),
                         [](const auto& hook) { return dynamic_cast<const WatchingHook*>(hook.get()) == nullptr; });
  };
  auto count = others(torch::autograd::impl::hooks(leaf));
  for (const auto* guard = WithoutGradientHooks::innermost(); guard != nullptr; guard = guard->outer_) {
    for (const auto& [hidden, hooks] : guard->hidden_) count += hidden.is_same(leaf) ? others(hooks) : 0;
  }
  return count > (has_list ? 1 : 0);
}

}  // namespace lockstep::ops
