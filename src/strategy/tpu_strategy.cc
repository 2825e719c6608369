#include "lockstep/strategy/tpu_strategy.h"

#include <cstdlib>

#include "base/text.h"
#include "lockstep/base/device_error.h"
#include "strategy/strategy_impl.h"

namespace lockstep {
namespace {

std::shared_ptr<ops::ProgramDevices> open(const TPUClusterResolver& resolver, int replicas) {
  const auto& open_devices = ops::open_program_devices();
  if (!open_devices) {
    throw DeviceError(
        "this build of Lockstep has no TPUStrategy: pjrt_c_api.h was not found, or LOCKSTEP_TPU was off, when it was "
        "configured");
  }
  return open_devices({resolver.options().plugin, resolver.options().plugin_options, replicas});
}

strategy::StrategySettings settings_of(const TPUClusterResolver& resolver, const TPUStrategyOptions& options) {
  strategy::StrategySettings settings{.placement = gradient::Placement::central,
                                      .timeout_seconds = options.timeout_seconds,
                                      .programs = open(resolver, options.num_replicas)};
  for (int i = 0; i < settings.programs->replicas(); ++i) settings.devices.push_back(text("tpu:", i));
  return settings;
}

}  // namespace

TPUClusterResolver::TPUClusterResolver(std::string tpu, TPUClusterResolverOptions options)
    : tpu_(std::move(tpu)), options_(std::move(options)) {
  if (tpu_.empty() || tpu_ == "local") return;
  const char* const here = std::getenv("TPU_NAME");
  if (here != nullptr && tpu_ == here) return;
  throw InvalidArgument(
      text("TPUClusterResolver: the TPU \"", tpu_, "\" is not this machine's, ",
           here == nullptr ? text("whose environment has no TPU_NAME") : text("which is \"", here, "\""),
           "; a program uses the chips of the machine that it runs on: start it there, and leave the "
           "name empty or \"local\""));
}

TPUTopology initialize_tpu_system(const TPUClusterResolver& resolver) {
  const auto devices = open(resolver, 0);
  return {devices->kind(), devices->replicas(), devices};
}

TPUStrategy::TPUStrategy(const TPUClusterResolver& resolver, TPUStrategyOptions options)
    : Strategy(std::make_shared<StrategyImpl>(settings_of(resolver, options))) {}

}  // namespace lockstep
