#include "lockstep/programs/tpu_strategy.h"

#include <chrono>
#include <cstdlib>

#include "base/text.h"
#include "lockstep/base/device_error.h"
#include "tpu/programs/programs.h"

namespace lockstep {
namespace {

constexpr std::chrono::seconds kToTell(10);

// A TPU's devices, and the processes that use them together; none: this one is alone.
struct System {
  std::optional<Job> job;
  std::shared_ptr<ops::ProgramDevices> devices;
};

std::optional<Job> job_of(const TPUClusterResolverOptions& options) {
  const auto cluster = options.cluster ? *options.cluster : resolve_cluster();
  if (cluster.task_type == "ps")
    throw InvalidArgument("TPUStrategy: this task is a parameter server, which has no part in it");
  if (cluster.world.size == 1 || std::getenv("LOCKSTEP_COMPILE_FOR") != nullptr) return std::nullopt;
  return Job(cluster, options.start_timeout_seconds);
}

// Returns the store by which processes find each other that open a TPU together.
Store store_of(const Job& job) { return job.store().prefixed("tpu/"); }

// Calls act(). Where it fails, tells the processes that wait for this one's devices, or for its part of a Group, why.
template <class Act>
void telling_others(const Job& job, const Act& act) {
  try {
    act();
  } catch (const std::exception& error) {
    const auto& world = job.world();
    const auto reason = text("rank ", world.rank, " on ", world.host, ": ", error.what());
    store_of(job).fail_waiters("", reason, Deadline::after(kToTell));
    job.fail_waiters(reason);
    throw;
  }
}

System open(const TPUClusterResolver& resolver, int replicas) {
  const auto& open_devices = ops::open_program_devices();
  const auto& options = resolver.options();
  ops::ProgramDevicesOptions wanted{options.plugin, options.plugin_options, replicas, options.start_timeout_seconds};
  System system{.job = job_of(options)};
  if (!system.job) {
    system.devices = open_devices(wanted);
    return system;
  }
  const auto& world = system.job->world();
  const auto store = store_of(*system.job);
  wanted.processes.emplace(ops::ProgramProcesses{world.rank, world.size, store});
  telling_others(*system.job, [&] { system.devices = open_devices(wanted); });
  return system;
}

std::shared_ptr<StrategyImpl> make_strategy(const TPUClusterResolver& resolver, const TPUStrategyOptions& options) {
  auto system = open(resolver, options.num_replicas);
  strategy::StrategySettings settings{
      .placement = gradient::Placement::central,
      .timeouts = {.start = resolver.options().start_timeout_seconds, .step = options.timeout_seconds},
      .kind = std::make_shared<programs::Programs>(system.devices)};
  for (int i = 0; i < system.devices->replicas(); ++i) settings.devices.push_back(text("tpu:", i));
  if (!system.job) return std::make_shared<StrategyImpl>(settings);
  const auto& world = system.job->world();
  settings.partition = {world.local_rank, world.local_size, system.job->has_own_cores()};
  settings.workers.emplace().membership = std::make_shared<elastic::JobMembership>(*system.job);
  std::shared_ptr<StrategyImpl> made;
  telling_others(*system.job, [&] { made = std::make_shared<StrategyImpl>(settings); });
  return made;
}

}  // namespace

TPUClusterResolver::TPUClusterResolver(std::string tpu, TPUClusterResolverOptions options)
    : tpu_(std::move(tpu)), options_(std::move(options)) {
  require(options_.start_timeout_seconds > 0, "TPUClusterResolver: start_timeout_seconds",
          options_.start_timeout_seconds, "above 0");
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
  const auto [job, devices] = open(resolver, 0);
  return {devices->kind(), devices->all_replicas(), job ? job->size() : 1, devices};
}

TPUStrategy::TPUStrategy(const TPUClusterResolver& resolver, TPUStrategyOptions options)
    : Strategy(make_strategy(resolver, options)) {}

}  // namespace lockstep
