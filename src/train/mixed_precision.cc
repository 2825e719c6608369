#include "train/mixed_precision.h"

#include <ATen/ATen.h>

#include <atomic>

#include "base/text.h"
#include "lockstep/error.h"
#include "lockstep/mixed_precision.h"

namespace lockstep {
namespace {

constexpr const char* kNames[] = {"float32", "mixed_bfloat16"};
std::atomic<bool> global_bfloat16 = false;

}  // namespace

void set_global_policy(const std::string& name) {
  if (name != kNames[0] && name != kNames[1]) {
    throw InvalidArgument(
        text("no precision policy is called \"", name, "\"; there are ", kNames[0], " and ", kNames[1]));
  }
  global_bfloat16 = name == kNames[1];
}

std::string global_policy() { return kNames[global_bfloat16 ? 1 : 0]; }

ComputePolicy ComputePolicy::current() { return ComputePolicy(global_bfloat16); }

Tensor ComputePolicy::outputs(const Tensor& computed) const {
  return bfloat16_ && computed.scalar_type() == at::kBFloat16 ? computed.to(at::kFloat) : computed;
}

ComputePolicy::Scope::Scope(const ComputePolicy& policy, c10::DeviceType device)
    : active_(policy.bfloat16_), device_(device) {
  if (!active_) return;
  enabled_before_ = at::autocast::is_autocast_enabled(device_);
  cache_before_ = at::autocast::is_autocast_cache_enabled();
  dtype_before_ = at::autocast::get_autocast_dtype(device_);
  at::autocast::set_autocast_cache_enabled(false);  // it is global to the process, and replicas are threads
  at::autocast::set_autocast_dtype(device_, at::kBFloat16);
  at::autocast::set_autocast_enabled(device_, true);
}

ComputePolicy::Scope::~Scope() {
  if (!active_) return;
  at::autocast::set_autocast_enabled(device_, enabled_before_);
  at::autocast::set_autocast_dtype(device_, dtype_before_);
  at::autocast::set_autocast_cache_enabled(cache_before_);
}

}  // namespace lockstep
