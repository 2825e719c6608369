#include "strategy/strategy_impl.h"

#include <ATen/DeviceGuard.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <set>

#include "base/hash.h"
#include "base/resources.h"
#include "base/text.h"
#include "elastic/failures.h"
#include "lockstep/base/version.h"

namespace lockstep {
namespace {

// Counted in rounds of about 20 ns: long enough where replicas end their backward at nearly the same time.
constexpr int kSpinRounds = 2000;

constexpr int kMostThreads = 1024;  // most threads of a replica: each is really started

strategy::StrategySettings checked(strategy::StrategySettings settings) {
  std::set<std::string> seen;
  for (const auto& device : settings.devices) {
    settings.kind->check_device(device);
    if (!seen.insert(device).second) throw InvalidArgument(text("device ", device, " is named twice"));
  }
  if (settings.threads_per_replica < 0 || settings.threads_per_replica > kMostThreads) {
    throw InvalidArgument(text("threads_per_replica is ", settings.threads_per_replica,
                               "; it must be from 0 (a share of the cores) to ", kMostThreads));
  }
  if (!(settings.timeout_seconds > 0)) {
    throw InvalidArgument(text("timeout_seconds is ", settings.timeout_seconds, "; it must be above 0"));
  }
  if (settings.threads_per_replica == 0) {
    settings.threads_per_replica =
        std::max(1, settings.partition.usable_cpu_count() / static_cast<int>(settings.devices.size()));
  }
  const auto computing = settings.threads_per_replica * static_cast<int>(settings.devices.size());
  settings.gradients.buckets.idle_cores = computing < settings.partition.usable_cpu_count();
  return settings;
}

// Returns the topology without the processes of `workers`, who find each other later.
Topology topology_of(const strategy::StrategySettings& settings) {
  auto topology = settings.kind->topology();
  topology.replicas = static_cast<int>(settings.devices.size());
  topology.came_later = settings.workers && settings.workers->membership && settings.workers->membership->is_newcomer();
  return topology;
}

}  // namespace

StrategyImpl::StrategyImpl(strategy::StrategySettings settings)
    : settings_(checked(std::move(settings))),
      topology_(topology_of(settings_)),
      threads_({.replicas = replicas(),
                .threads_per_replica = settings_.threads_per_replica,
                .cpus = settings_.partition.cpus(),
                .spin_rounds = spin_rounds()}) {
  for (const auto& device : settings_.devices) {
    torch_devices_.push_back(strategy::torch_device(device));
    random_.push_back(std::make_unique<ops::ReplicaRandom>(torch_devices_.back()));
  }
  make_groups();
  all_groups_.resize(settings_.devices.size());
  if (!settings_.workers) return;
  kind().connect(topology_, *settings_.workers, settings_.timeout_seconds);
  if (settings_.partition.size > 1) pin_current_thread(settings_.partition.cpus());
  topology_.all.check_all_agree("strategies", describe());
  seed_ = std::stoull(topology_.all.broadcast(std::to_string(seed_)));
  settings_.kind->begin(*this);
}

StrategyImpl::~StrategyImpl() {
  if (membership() != nullptr) membership()->leave();
}

std::string StrategyImpl::describe() const {
  const auto& elastic = settings_.workers->elastic;
  const auto& gradients = settings_.gradients;
  const auto& dtype = gradients.buckets.gradient_dtype;
  return text("Lockstep ", version(), "\nLibTorch ", TORCH_VERSION, "\nnumber of replicas ", replicas(),
              "\ngradient_dtype ", dtype ? name_of(*dtype) : "none", "\nbucket_cap in bytes ",
              gradients.buckets.bucket_bytes, "\nfirst_bucket in bytes ", gradients.buckets.first_bucket_bytes,
              "\nshard_optimizer_state ", gradients.shard_state ? "true" : "false", "\ncompare_copies_every ",
              gradients.compare_copies_every, "\nreplace_differing_copies ",
              gradients.replace_differing_copies ? "true" : "false", "\nelastic.min_workers ",
              elastic ? std::to_string(elastic->min_workers) : "none", "\nelastic.worker_batch.learning_rate_workers ",
              settings_.worker_batch ? std::to_string(settings_.worker_batch->learning_rate_workers) : "none",
              kind().describe());
}

double StrategyImpl::learning_rate_factor() const {
  const auto& batch = settings_.worker_batch;
  if (!batch) return 1;
  const double ratio = static_cast<double>(topology_.all.size()) / batch->learning_rate_workers;
  const double factor = batch->scaling(ratio);
  if (factor > 0 && std::isfinite(factor)) return factor;
  throw InvalidArgument(text("elastic.worker_batch.scaling(", ratio, ") is ", factor, "; it must be above 0"));
}

std::shared_ptr<GradientPath> StrategyImpl::make_gradient_path(const Optimizer& optimizer,
                                                               std::shared_ptr<ReplicatedParameters> parameters) const {
  auto options = settings_.gradients;
  if (is_elastic()) {
    options.elastic.emplace(
        gradient::ElasticRanks{.is_newcomer = topology_.is_newcomer(), .hosts = [this] { return hosts(); }});
  }
  return kind().make_gradient_path(*this, optimizer, std::move(parameters), std::move(options));
}

std::vector<std::string> StrategyImpl::hosts() const {
  const auto& processes = membership()->members().processes;
  const auto row = static_cast<std::size_t>(topology_.row_size);
  std::vector<std::string> hosts;
  for (auto rank = static_cast<std::size_t>(topology_.part); rank < processes.size(); rank += row)
    hosts.push_back(processes[rank].host);
  return hosts;
}

internal::LocalReplicas StrategyImpl::local_replicas(const Topology& topology) const {
  return {torch_devices_, topology.has_own_data() ? Communicator() : topology.data, topology.data};
}

const Group& StrategyImpl::group(int replica) const {
  if (topology_.data.size() == 1) return local_group(replica);
  if (replicas() == 1) return topology_.data.group();
  auto& group = all_groups_[static_cast<std::size_t>(replica)];
  if (!group) group = membership()->replica_group(replicas(), replica, settings_.workers->group);
  return *group;
}

int StrategyImpl::spin_rounds() const { return replicas() <= settings_.partition.usable_cpu_count() ? kSpinRounds : 0; }

void StrategyImpl::make_groups() { groups_ = make_thread_groups(replicas(), spin_rounds()); }

gradient::Placement StrategyImpl::placement() const {
  const bool on_gpus =
      std::any_of(torch_devices_.begin(), torch_devices_.end(), [](auto device) { return !device.is_cpu(); });
  if (!on_gpus) return settings_.placement;
  const bool in_host_memory =
      replicas() > 1 || kind().needs_host_values() || topology_.is_split || settings_.gradients.shard_state;
  return in_host_memory ? gradient::Placement::staged : gradient::Placement::device;
}

template <class Function>
void StrategyImpl::on_threads(const Function& function) {
  Mutex mutex;
  std::exception_ptr first;  // guarded by mutex
  threads_.run([&](int replica) {
    const at::OptionalDeviceGuard on_device(torch_device(replica));
    try {
      function(replica);
    } catch (...) {
      {
        MutexLock lock(mutex);
        if (!first) first = std::current_exception();
      }
      // `first` is set before: what the others throw now is a consequence.
      fail(replica);
    }
  });
  if (!first) return;
  make_groups();
  std::rethrow_exception(first);
}

void StrategyImpl::regroup(const elastic::Change& change) {
  membership()->regroup(change, settings_.workers->elastic->regroup_seconds);
  if (!change.leaves) take_group();
}

void StrategyImpl::join() {
  membership()->take_place();
  take_group();
}

void StrategyImpl::take_group() {
  kind().reconnect(topology_, *settings_.workers, settings_.workers->elastic->regroup_seconds);
  for (auto& group : all_groups_) group.reset();
}

// Aborts the Groups of this process and of the workers with the reason, so that nobody waits for this replica. Other
// workers find by themselves that one is lost.
void StrategyImpl::fail(int replica) const {
  std::string why = text("replica ", topology_.first_replica() + replica, " failed");
  bool all_know = false;
  try {
    throw;
  } catch (const PeerLost& error) {
    all_know = is_elastic();
    why = error.what();
  } catch (const std::exception& error) {
    tell_failure(error);
    if (topology_.all.size() > 1) why += text(here(), ": ", error.what());
  } catch (...) {
  }
  local_group(replica).abort(why);
  if (all_know) return;
  if (topology_.all.size() > 1) topology_.all.group().abort(why);
  const auto& all = all_groups_[static_cast<std::size_t>(replica)];
  if (all) return all->abort(why);
  if (topology_.all.size() > 1 && membership() != nullptr)
    membership()->fail_waiters(why);  // other replicas may be making that Group
}

std::string StrategyImpl::here() const {
  return membership() != nullptr ? text(" on ", membership()->world().host) : "";
}

void StrategyImpl::tell_failure(const std::exception& error) const {
  kind().tell_failure(error);
  if (!is_elastic() || !elastic::is_of_program(error)) return;
  membership()->tell_failure(completed_sections_.count, error);
}

void StrategyImpl::on_replicas(const std::function<void(int)>& function) { on_threads(function); }

void StrategyImpl::run(const std::function<void(ReplicaContext&)>& function) {
  const auto run_seed = mix(seed_, ++runs_);
  on_threads([&](int replica) {
    ReplicaContext context(replica, *this);
    context.seed_random(mix(run_seed, static_cast<std::uint64_t>(context.replica_id())));
    const ops::ReplicaRandom::Use use(random(replica));
    function(context);
  });
  count_run();
}

std::vector<std::uint64_t> StrategyImpl::next_run_seeds() {
  const auto run_seed = mix(seed_, ++runs_);
  std::vector<std::uint64_t> seeds;
  for (int replica = 0; replica < replicas(); ++replica)
    seeds.push_back(mix(run_seed, static_cast<std::uint64_t>(topology_.first_replica() + replica)));
  return seeds;
}

}  // namespace lockstep
