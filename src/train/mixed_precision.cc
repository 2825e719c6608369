#include "train/mixed_precision.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/train/mixed_precision.h"

namespace lockstep {
namespace {

struct Policy {
  const char* name;
  std::optional<at::ScalarType> type;
};
constexpr std::array kPolicies{Policy{"float32", {}}, Policy{"mixed_bfloat16", at::kBFloat16},
                               Policy{"mixed_float16", at::kHalf}};
std::atomic<const Policy*> global_choice = kPolicies.data();

}  // namespace

void set_global_policy(const std::string& name) {
  const auto found =
      std::find_if(kPolicies.begin(), kPolicies.end(), [&](const Policy& policy) { return policy.name == name; });
  if (found == kPolicies.end()) {
    throw InvalidArgument(
        text("no precision policy is called \"", name, "\"; there are float32, mixed_bfloat16 and mixed_float16"));
  }
  global_choice = found;
}

std::string global_policy() { return global_choice.load()->name; }

train::ComputePolicy train::ComputePolicy::current() { return train::ComputePolicy(global_choice.load()->type); }

void train::ComputePolicy::check(const std::vector<c10::Device>& devices) const {
  const bool on_cpu = std::any_of(devices.begin(), devices.end(), [](auto device) { return device.is_cpu(); });
  if (type_ == at::kHalf && on_cpu) {
    throw InvalidArgument("mixed_float16 computes on GPUs only, and this strategy has a CPU; use mixed_bfloat16 there");
  }
}

Tensor train::ComputePolicy::outputs(const Tensor& computed) const {
  return type_ && computed.scalar_type() == *type_ ? computed.to(at::kFloat) : computed;
}

Optimizer train::ComputePolicy::wrapped(const Optimizer& optimizer) const {
  const bool needed = type_ == at::kHalf && !optimizer.options().loss_scale;
  return needed ? LossScaleOptimizer(optimizer) : optimizer;
}

train::ComputePolicy::Scope::Scope(const train::ComputePolicy& policy, c10::DeviceType device)
    : active_(policy.type_.has_value()), device_(device) {
  if (!active_) return;
  enabled_before_ = at::autocast::is_autocast_enabled(device_);
  cache_before_ = at::autocast::is_autocast_cache_enabled();
  dtype_before_ = at::autocast::get_autocast_dtype(device_);
  at::autocast::set_autocast_cache_enabled(false);  // it is global to the process, and replicas are threads
  at::autocast::set_autocast_dtype(device_, *policy.type_);
  at::autocast::set_autocast_enabled(device_, true);
}

train::ComputePolicy::Scope::~Scope() {
  if (!active_) return;
  at::autocast::set_autocast_enabled(device_, enabled_before_);
  at::autocast::set_autocast_dtype(device_, dtype_before_);
  at::autocast::set_autocast_cache_enabled(cache_before_);
}

}  // namespace lockstep
