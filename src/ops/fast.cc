#include "ops/fast.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>

#include <cstdlib>
#include <string_view>
#include <unordered_map>

#include "ops/parameter_hook.h"

namespace lockstep::ops {

bool fast_operators() {
  static const bool chosen = [] {
    const char* choice = std::getenv("LOCKSTEP_KERNELS");
    return choice == nullptr || std::string_view(choice) != "libtorch";
  }();
  return chosen;
}

bool fast_fusion() { return fast_operators() && !at::autocast::is_autocast_enabled(at::kCPU); }

bool fast(const at::Tensor& x) {
  return x.device().is_cpu() && x.layout() == at::kStrided && x.scalar_type() == at::kFloat && x.numel() > 0 &&
         !has_hooks(x) && !x.is_neg() && !x._is_zerotensor() && !x._fw_grad(/*level=*/0).defined();
}

namespace {

std::unordered_map<const void*, at::Tensor>& offered() {
  thread_local std::unordered_map<const void*, at::Tensor> by_values;
  return by_values;
}

}  // namespace

void offer_gradient_memory(const void* values, at::Tensor memory) { offered()[values] = std::move(memory); }

void clear_gradient_memory() { offered().clear(); }

at::Tensor take_gradient_memory(const void* values, at::IntArrayRef sizes, const at::TensorOptions& options) {
  const auto found = offered().find(values);
  if (found == offered().end() || found->second.sizes() != sizes || found->second.dtype() != options.dtype()) {
    return at::empty(sizes, options);
  }
  auto memory = std::move(found->second);
  offered().erase(found);
  return memory;
}

}  // namespace lockstep::ops
