#include "strategy/strategy_impl.h"

#include <torch/headeronly/version.h>

#include <algorithm>
#include <set>

#include "base/hash.h"
#include "base/process.h"
#include "base/text.h"
#include "gradient/outer_step.h"
#include "lockstep/base/version.h"

namespace lockstep {
namespace {

constexpr int kMostThreads = 1024;  // most threads of a replica: each is really started

strategy::StrategySettings checked(strategy::StrategySettings settings) {
  std::set<std::string> seen;
  for (const auto& device : settings.devices) {
    settings.kind->check_device(device);
    if (!seen.insert(device).second) throw InvalidArgument(text("device ", device, " is named twice"));
  }
  const int threads = settings.threads_per_replica;
  require(threads >= 0 && threads <= kMostThreads, "threads_per_replica", threads, "from 0 (a share of the cores) to ",
          kMostThreads);
  require(settings.timeouts.step > 0, "timeout_seconds", settings.timeouts.step, "above 0");
  if (settings.threads_per_replica == 0) {
    settings.threads_per_replica =
        std::max(1, settings.partition.usable_cpu_count() / static_cast<int>(settings.devices.size()));
  }
  if (settings.workers) {
    settings.workers->group.timeout_seconds = settings.timeouts.start;
    settings.workers->group.lost_host_seconds = settings.timeouts.lost_host;
  }
  const auto computing = settings.threads_per_replica * static_cast<int>(settings.devices.size());
  settings.gradients.buckets.idle_cores = computing < settings.partition.usable_cpu_count();
  return settings;
}

}  // namespace

StrategyImpl::StrategyImpl(strategy::StrategySettings settings)
    : settings_(checked(std::move(settings))), workers_(settings_), replicas_(settings_, workers_) {
  if (!settings_.workers) return;
  workers_.connect();
  if (settings_.partition.size > 1) pin_current_thread(settings_.partition.cpus());
  topology().all.check_all_agree("strategies", describe());
  workers_.form_groups();
  seeds_.share(topology().all);
  settings_.kind->begin(*this);
}

StrategyImpl::~StrategyImpl() {
  if (workers_.membership() != nullptr) workers_.membership()->leave();
}

std::string StrategyImpl::describe() const {
  const auto& elastic = settings_.workers->elastic;
  const auto& gradients = settings_.gradients;
  const auto& dtype = gradients.buckets.gradient_dtype;
  // Workers with their parts on GPUs make other calls than those without.
  const std::string shards = !gradients.shard_state                       ? "false"
                             : placement() == gradient::Placement::device ? "true, on GPUs"
                                                                          : "true, in host memory";
  const auto diloco = gradients.diloco ? gradient::describe(*gradients.diloco) : std::string("none\n");
  return text("Lockstep ", version(), "\nLibTorch ", TORCH_VERSION, "\nnumber of replicas ", replicas_.count(),
              "\ngradient_dtype ", dtype ? name_of(*dtype) : "none", "\nbucket_cap in bytes ",
              gradients.buckets.bucket_bytes, "\nfirst_bucket in bytes ", gradients.buckets.first_bucket_bytes,
              "\nshard_optimizer_state ", shards, "\ncompare_copies_every ", gradients.compare_copies_every,
              "\nreplace_differing_copies ", gradients.replace_differing_copies ? "true" : "false",
              "\nelastic.min_workers ", elastic ? std::to_string(elastic->min_workers) : "none",
              "\nelastic.worker_batch.learning_rate_workers ",
              settings_.worker_batch ? std::to_string(settings_.worker_batch->learning_rate_workers) : "none",
              "\nworkers_per_group ", settings_.workers->per_group, "\nDiLoCo's ", diloco, kind().describe());
}

std::shared_ptr<GradientPath> StrategyImpl::make_gradient_path(const Optimizer& optimizer,
                                                               std::shared_ptr<ReplicatedParameters> parameters) {
  auto options = settings_.gradients;
  if (workers_.is_elastic()) {
    options.elastic.emplace(
        gradient::ElasticRanks{.is_newcomer = topology().is_newcomer(), .hosts = [this] { return workers_.hosts(); }});
  }
  if (parameters->placement() == gradient::Placement::device && replicas_.count() > 1) {
    options.replicas = gradient::ReplicaRanks{.of = replicas_.gradient_ranks(),
                                              .on_replicas = [this](const auto& function) { replicas_.run(function); }};
  }
  return kind().make_gradient_path(*this, optimizer, std::move(parameters), std::move(options));
}

gradient::Placement StrategyImpl::placement() const {
  const auto& devices = replicas_.devices();
  if (std::ranges::all_of(devices, [](auto device) { return device.is_cpu(); })) return settings_.placement;
  const bool sum_on_gpus = settings_.gpu_backend && settings_.placement == gradient::Placement::mirrored &&
                           std::ranges::all_of(devices, [](auto device) { return device.is_cuda(); });
  const bool are_several = replicas_.count() > 1;
  const bool in_host_memory = kind().needs_host_values() || topology().is_split ||
                              (workers_.is_elastic() && (are_several || settings_.gradients.shard_state)) ||
                              (are_several && (!sum_on_gpus || settings_.gradients.diloco));
  return in_host_memory ? gradient::Placement::staged : gradient::Placement::device;
}

void StrategyImpl::run(const std::function<void(ReplicaContext&)>& function) {
  const auto run_seed = seeds_.next();
  replicas_.run([&](int replica) {
    ReplicaContext context(replica, *this);
    context.seed_random(mix(run_seed, static_cast<std::uint64_t>(context.replica_id())));
    const ops::ReplicaRandom::Use use(replicas_.random(replica));
    function(context);
  });
  replicas_.count_step();
}

}  // namespace lockstep
