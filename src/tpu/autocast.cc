#include "tpu/autocast.h"

#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace lockstep::tpu {
namespace {

constexpr auto kKey = c10::DispatchKey::AutocastPrivateUse1;

}  // namespace

// LibTorch's macros register with a library that is called `m`.
void register_autocast() {
  using namespace at::autocast;  // NOLINT: whose names the macros use
  static torch::Library others(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  if (!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kKey))
    others.fallback(torch::CppFunction::makeFallthrough());
  static torch::Library m(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
#define LOCKSTEP_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOCKSTEP_LOWER_PRECISION)
#undef LOCKSTEP_LOWER_PRECISION
#define LOCKSTEP_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(LOCKSTEP_FP32)
#undef LOCKSTEP_FP32
#define LOCKSTEP_FP32_BY_OPTION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(LOCKSTEP_FP32_BY_OPTION)
#undef LOCKSTEP_FP32_BY_OPTION
#define LOCKSTEP_PROMOTED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(LOCKSTEP_PROMOTED)
#undef LOCKSTEP_PROMOTED
}

}  // namespace lockstep::tpu
