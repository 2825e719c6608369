#include "lockstep/strategy/parameter_server_strategy.h"

#include "base/text.h"
#include "parameter_server/server_cluster.h"
#include "parameter_server/servers/servers.h"
#include "strategy/devices.h"

namespace lockstep {
namespace {

using parameter_server::Role;
using parameter_server::ServerCluster;

template <class... Allowed>
void check(bool holds, const char* name, int value, const Allowed&... allowed) {
  require(holds, text("ParameterServerStrategy: ", name), value, allowed...);
}

int replicas_of_shards(const ParameterServerOptions& options, int servers) {
  const int replicas = options.replicas_of_shards;
  check(replicas >= 1 && replicas <= 2, "replicas_of_shards", replicas, "1 or 2");
  check(replicas <= servers, "replicas_of_shards", replicas, "1 with one server");
  return replicas;
}

bool bfloat16_gradients(const ParameterServerOptions& options) {
  const auto dtype = options.gradient_dtype.value_or(DType::bfloat16);
  require(dtype == DType::bfloat16, "ParameterServerStrategy: gradient_dtype", name_of(dtype), "bfloat16, or not set");
  return options.gradient_dtype.has_value();
}

parameter_server::UpdateMode mode_of(const ParameterServerOptions& options, int workers) {
  const int bound = options.staleness_bound, spare = options.spare_workers;
  check(bound >= -1, "staleness_bound", bound, "-1 (none) or more");
  if (!options.synchronous) {
    check(spare == 0, "spare_workers", spare, "0 unless synchronous is set");
    return {.most_ahead = bound};
  }
  check(bound == -1, "staleness_bound", bound, "-1 where synchronous is set");
  check(spare >= 0 && spare < workers, "spare_workers", spare, "from 0 to ", workers - 1, " with ", workers,
        " workers");
  return {.parts = workers, .needed = workers - spare};
}

// Returns a worker's own devices, and all cores of its host for the chief, which evaluates. Servers compute no step.
std::vector<std::string> devices_of(const ParameterServerOptions& options, Role role,
                                    const cluster::CpuPartition& partition) {
  if (role == Role::ps) return {"cpu:0"};
  auto devices = options.devices.empty() ? strategy::default_devices(partition) : options.devices;
  const bool own_choice = options.devices.empty() && devices[0].starts_with("cpu");
  return role == Role::worker && own_choice ? std::vector<std::string>{"cpu:0"} : devices;
}

strategy::StrategySettings settings_of(ParameterServerOptions options) {
  const auto resolved = options.cluster ? *options.cluster : resolve_cluster();
  const auto cluster = parameter_server::with_roles(resolved, options.num_ps, options.evaluator);
  const auto roles = parameter_server::roles_of(cluster);
  const auto mode = mode_of(options, roles.workers);
  auto among = std::make_shared<ServerCluster>(
      cluster, parameter_server::ServerClusterOptions{.partitioner = options.variable_partitioner,
                                                      .mode = mode,
                                                      .replicas_of_shards = replicas_of_shards(options, roles.servers),
                                                      .bfloat16_gradients = bfloat16_gradients(options),
                                                      .start_seconds = options.start_timeout_seconds,
                                                      .reconnect_seconds = options.reconnect_timeout_seconds});
  strategy::StrategySettings settings{
      .threads_per_replica = options.threads_per_replica,
      .partition = among->partition(),
      .timeouts = {.start = options.start_timeout_seconds, .step = options.timeout_seconds}};
  settings.devices = devices_of(options, roles.mine, settings.partition);
  const int replicas = among->agree_on_replicas(static_cast<int>(settings.devices.size()));
  settings.kind = std::make_shared<servers::Servers>(among, mode.parts * replicas);
  if (settings.partition.size > 1) cluster::keep_to_partition(settings.partition);
  return settings;
}

const parameter_server::Roles& roles_in(const ParameterServerStrategy& strategy) {
  return servers::servers_of(unwrap(strategy)).cluster().roles();
}

}  // namespace

std::string ParameterServerStrategy::task_type() const { return parameter_server::name_of(roles_in(*this).mine); }
int ParameterServerStrategy::task_index() const { return roles_in(*this).index; }
int ParameterServerStrategy::num_workers() const { return roles_in(*this).workers; }
int ParameterServerStrategy::num_ps() const { return roles_in(*this).servers; }

}  // namespace lockstep

// The library's entry, for ParameterServerStrategy's constructor.
extern "C" void lockstep_make_parameter_servers(lockstep::ParameterServerOptions&& options,
                                                std::shared_ptr<lockstep::StrategyImpl>& made) {
  made = std::make_shared<lockstep::StrategyImpl>(lockstep::settings_of(std::move(options)));
}
