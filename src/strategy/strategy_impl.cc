#include "strategy/strategy_impl.h"

#include <ATen/DeviceGuard.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <set>

#include "base/hash.h"
#include "base/resources.h"
#include "base/text.h"
#include "lockstep/version.h"

namespace lockstep {
namespace {

// Long enough for another replica to end its backward at nearly the same time, in rounds of about 20 ns.
constexpr int kSpinRounds = 2000;

// Where in the store the Group of all replicas is made.
constexpr const char* kOfReplicas = "replicas/";
constexpr std::chrono::seconds kForLastWords(1);

StrategySettings checked(StrategySettings settings) {
  std::set<std::string> seen;
  for (const auto& device : settings.devices) {
    check_device(device);
    if (!seen.insert(device).second) throw InvalidArgument(text("device ", device, " is named twice"));
  }
  if (settings.threads_per_replica < 0) {
    throw InvalidArgument(
        text("threads_per_replica is ", settings.threads_per_replica, "; it must be 0 (a share of the cores) or more"));
  }
  if (!(settings.timeout_seconds > 0)) {
    throw InvalidArgument(text("timeout_seconds is ", settings.timeout_seconds, "; it must be above 0"));
  }
  if (settings.threads_per_replica == 0) {
    settings.threads_per_replica =
        std::max(1, settings.share.usable_cpu_count() / static_cast<int>(settings.devices.size()));
  }
  return settings;
}

}  // namespace

StrategyImpl::StrategyImpl(StrategySettings settings)
    : settings_(checked(std::move(settings))),
      threads_({.replicas = replicas(),
                .threads_per_replica = settings_.threads_per_replica,
                .cpus = settings_.share.cpus(),
                .spin_rounds = spin_rounds()}) {
  for (const auto& device : settings_.devices) {
    torch_devices_.push_back(lockstep::torch_device(device));
    random_.push_back(std::make_unique<ReplicaRandom>(torch_devices_.back()));
  }
  make_groups();
  all_groups_.resize(settings_.devices.size());
  if (!settings_.workers) return;
  const auto& [world, store, options, gradients] = *settings_.workers;
  const bool idle_cores = settings_.threads_per_replica * replicas() < settings_.share.usable_cpu_count();
  workers_ = Workers(make_group(world, store.prefixed("workers/"), options), settings_.timeout_seconds, idle_cores);
  if (settings_.share.size > 1) pin_current_thread(settings_.share.cpus());
  workers_.require_same("versions", text("Lockstep ", version(), "\nLibTorch ", TORCH_VERSION));
  workers_.require_same("numbers of replicas", std::to_string(replicas()));
  workers_.require_same(
      "options", text("gradient_dtype ", gradients.wire ? name_of(*gradients.wire) : "none", "\nbucket_cap in bytes ",
                      gradients.bucket_bytes, "\nfirst_bucket in bytes ", gradients.first_bucket_bytes,
                      "\ncompare_copies_every ", gradients.compare_copies_every));
  seed_ = std::stoull(workers_.share(std::to_string(seed_)));
}

std::shared_ptr<UpdateEngine> StrategyImpl::make_engine(const Optimizer& optimizer,
                                                        std::shared_ptr<ReplicatedParameters> parameters) const {
  return std::make_shared<UpdateEngine>(std::move(parameters), optimizer, settings_.exchange, settings_.root,
                                        settings_.workers ? settings_.workers->gradients : WorkerGradientsOptions{});
}

internal::LocalReplicas StrategyImpl::local_replicas() const {
  internal::LocalReplicas replicas{torch_devices_, first_replica(), all_replicas()};
  if (workers_.alone()) return replicas;
  replicas.any = [workers = workers_](bool holds) { return workers.any(holds); };
  return replicas;
}

const Group& StrategyImpl::group(int replica) const {
  if (workers_.alone()) return local_group(replica);
  if (replicas() == 1) return workers_.group();
  auto& group = all_groups_[static_cast<std::size_t>(replica)];
  if (!group) {
    auto world = settings_.workers->world;
    world.rank = first_replica() + replica;
    world.size = all_replicas();
    group = make_group(world, settings_.workers->store.prefixed(kOfReplicas), settings_.workers->group);
  }
  return *group;
}

int StrategyImpl::spin_rounds() const { return replicas() <= settings_.share.usable_cpu_count() ? kSpinRounds : 0; }

void StrategyImpl::make_groups() { groups_ = make_thread_groups(replicas(), spin_rounds()); }

Placement StrategyImpl::placement() const {
  const bool on_gpus =
      std::any_of(torch_devices_.begin(), torch_devices_.end(), [](auto device) { return !device.is_cpu(); });
  if (!on_gpus) return settings_.placement;
  return replicas() == 1 ? Placement::device : Placement::staged;
}

void StrategyImpl::on_replicas(const std::function<void(int)>& function) {
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
      // After `first` is set: what the others throw now is a consequence.
      fail(replica);
    }
  });
  if (!first) return;
  make_groups();
  std::rethrow_exception(first);
}

// Other workers hear why, too: whoever waits for this replica waits in vain.
void StrategyImpl::fail(int replica) const {
  std::string why = text("replica ", first_replica() + replica, " failed");
  try {
    throw;
  } catch (const std::exception& error) {
    if (!workers_.alone()) why += text(" on ", settings_.workers->world.host, ": ", error.what());
  } catch (...) {
  }
  local_group(replica).abort(why);
  if (!workers_.alone()) workers_.group().abort(why);
  const auto& all = all_groups_[static_cast<std::size_t>(replica)];
  if (all) return all->abort(why);
  if (workers_.alone()) return;
  try {  // others may be making it
    settings_.workers->store.prefixed(kOfReplicas).abandon("", why, Deadline::after(kForLastWords));
  } catch (const Error&) {
    // The store is gone: nobody waits there.
  }
}

void StrategyImpl::run(const std::function<void(ReplicaContext&)>& function) {
  const auto run_seed = mix(seed_, ++runs_);
  on_replicas([&](int replica) {
    ReplicaContext context(replica, *this);
    context.seed_random(mix(run_seed, static_cast<std::uint64_t>(context.replica_id())));
    const ReplicaRandom::Use use(random(replica));
    function(context);
  });
}

}  // namespace lockstep
