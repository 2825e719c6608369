#include "ops/fast.h"

#include <ATen/autocast_mode.h>

#include <cstdlib>
#include <string_view>

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

}  // namespace lockstep::ops
