#include "lockstep/strategy/multi_worker_mirrored_strategy.h"

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "gradient/outer_step.h"
#include "strategy/devices.h"
#include "strategy/strategy_impl.h"

namespace lockstep {
namespace {

std::size_t bytes_of(double megabytes) { return static_cast<std::size_t>(megabytes * 1024 * 1024); }

// Each worker that remains must be able to go on, and all to bring their variables together at any step.
void check_elastic_diloco(const MultiWorkerMirroredOptions& options) {
  const auto require_with_elastic = [](const char* name, auto value, auto allowed) {
    if (value == allowed) return;
    throw InvalidArgument(text("MultiWorkerMirroredStrategy: ", name, " is ", value,
                               "; with `diloco` and `elastic` it must be ", allowed));
  };
  require_with_elastic("workers_per_group", options.workers_per_group, 1);
  require_with_elastic("diloco->parts", options.diloco->parts, 1);
  require_with_elastic("diloco->overlap", options.diloco->overlap, std::int64_t{0});
  if (!options.elastic->worker_batch) return;
  throw InvalidArgument(
      "MultiWorkerMirroredStrategy: `diloco` is not for elastic.worker_batch, whose learning rate follows the number "
      "of workers: each worker updates by its own examples alone");
}

void check_diloco(const MultiWorkerMirroredOptions& options) {
  require(options.workers_per_group >= 1, "MultiWorkerMirroredStrategy: workers_per_group", options.workers_per_group,
          "1 or more");
  const auto refuse = [](const char* what) { throw InvalidArgument(text("MultiWorkerMirroredStrategy: ", what)); };
  if (!options.diloco && options.workers_per_group > 1) refuse("workers_per_group is for `diloco`, which is not set");
  if (!options.diloco) return;
  gradient::check(*options.diloco);
  if (options.communication.gradient_dtype && options.workers_per_group == 1)
    refuse(
        "communication.gradient_dtype: with `diloco` workers send no gradients; set diloco->dtype, or "
        "workers_per_group");
  if (options.elastic) check_elastic_diloco(options);
  if (options.replace_differing_copies)
    refuse(
        "`diloco` is not for replace_differing_copies: those of one group would get other values than those of others");
  if (options.shard_optimizer_state)
    refuse("`diloco` is not for shard_optimizer_state: each worker needs all its state");
}

strategy::StrategySettings settings_of(MultiWorkerMirroredOptions options) {
  const auto& communication = options.communication;
  const auto require_above_zero = [](const char* name, double value) {
    require(value > 0, text("MultiWorkerMirroredStrategy: ", name), value, "above 0");
  };
  require_above_zero("bucket_cap_mb", communication.bucket_cap_mb.value_or(1));
  require_above_zero("first_bucket_mb", communication.first_bucket_mb);
  require_above_zero("start_timeout_seconds", options.start_timeout_seconds);
  require(options.compare_copies_every >= 0, "MultiWorkerMirroredStrategy: compare_copies_every",
          options.compare_copies_every, "0 (never) or more steps");
  if (options.replace_differing_copies && options.shard_optimizer_state) {
    throw InvalidArgument(
        "MultiWorkerMirroredStrategy: replace_differing_copies is not for shard_optimizer_state, where no other worker "
        "has the state of one that differs");
  }
  if (options.elastic) strategy::check("MultiWorkerMirroredStrategy", *options.elastic);
  check_diloco(options);
  const auto cluster = options.cluster ? *options.cluster : resolve_cluster();
  if (cluster.task_type == "ps") {
    throw InvalidArgument("MultiWorkerMirroredStrategy: this task is a parameter server, which has no part in it");
  }
  const auto& world = cluster.world;
  if (world.local_size < 1 || world.local_rank < 0 || world.local_rank >= world.local_size) {
    throw InvalidArgument(text("World: local rank ", world.local_rank, " of ", world.local_size));
  }
  if (cluster.joins && !options.elastic) {
    throw InvalidArgument(
        "MultiWorkerMirroredStrategy: this process comes to a job that runs (LOCKSTEP_JOIN), which takes it in only "
        "where the strategies have `elastic`");
  }
  const bool may_grow = options.elastic && !cluster.store.empty();
  std::optional<Job> job;
  if (cluster.joins)
    job = Job::newcomer(cluster, options.start_timeout_seconds);
  else if (world.size > 1 || may_grow)
    job.emplace(cluster, options.start_timeout_seconds);
  const auto bounds = options.elastic.value_or(ElasticOptions());
  const cluster::CpuPartition partition{world.local_rank, world.local_size, job && job->has_own_cores()};
  strategy::StrategySettings settings{
      .devices = options.devices.empty() ? strategy::default_devices(partition) : std::move(options.devices),
      .threads_per_replica = options.threads_per_replica,
      .partition = partition,
      .gpu_backend = communication.implementation == Implementation::nccl ? "nccl" : "auto",
      .timeouts = {.start = options.start_timeout_seconds,
                   .step = communication.timeout_seconds,
                   .regroup = bounds.regroup_seconds,
                   .lost_host = options.elastic ? bounds.lost_host_seconds : kLostHostSeconds},
      .worker_batch = options.elastic ? options.elastic->worker_batch : std::nullopt};
  auto& gradients = settings.gradients;
  gradients.shard_state = options.shard_optimizer_state;  // over the GPUs of a worker alone, too
  gradients.diloco = options.diloco;
  if (!job && options.workers_per_group > 1) {
    throw InvalidArgument(text("MultiWorkerMirroredStrategy: workers_per_group is ", options.workers_per_group,
                               "; this worker is alone"));
  }
  if (!job) return settings;
  gradients.buckets = {.bucket_bytes = bytes_of(communication.bucket_cap_mb.value_or(0)),
                       .first_bucket_bytes = bytes_of(communication.first_bucket_mb),
                       .gradient_dtype = communication.gradient_dtype};
  gradients.compare_copies_every = options.compare_copies_every;
  gradients.replace_differing_copies = options.replace_differing_copies;
  settings.workers.emplace(
      strategy::WorkerSettings{.membership = options.elastic ? std::make_shared<elastic::JobMembership>(*job, 1, 0)
                                                             : std::make_shared<elastic::JobMembership>(*job),
                               .group = {.backend = communication.backend,
                                         .network = communication.network,
                                         .implementation = communication.implementation},
                               .elastic = options.elastic,
                               .per_group = options.diloco ? options.workers_per_group : 0});
  return settings;
}

std::shared_ptr<StrategyImpl> make_workers_strategy(MultiWorkerMirroredOptions options) {
  const bool needs_gpus = options.communication.implementation == Implementation::nccl;
  auto made = std::make_shared<StrategyImpl>(settings_of(std::move(options)));
  if (!needs_gpus || made->placement() == gradient::Placement::device) return made;
  throw InvalidArgument(
      "MultiWorkerMirroredStrategy: communication.implementation nccl is for gradients on GPUs; they are in host "
      "memory on CPUs, with `diloco` and several GPUs a worker, and with `elastic` and either several GPUs a worker or "
      "shard_optimizer_state");
}

}  // namespace

double linear_scaling(double ratio) { return ratio; }
double square_root_scaling(double ratio) { return std::sqrt(ratio); }

MultiWorkerMirroredStrategy::MultiWorkerMirroredStrategy(MultiWorkerMirroredOptions options)
    : Strategy(make_workers_strategy(std::move(options))) {}

int MultiWorkerMirroredStrategy::worker_rank() const { return unwrap(*this).topology().all.rank(); }
int MultiWorkerMirroredStrategy::num_workers() const { return unwrap(*this).topology().all.size(); }

}  // namespace lockstep
