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
#include "strategy/server_reduction.h"

namespace lockstep {
namespace {

// Counted in rounds of about 20 ns: long enough where replicas end their backward at nearly the same time.
constexpr int kSpinRounds = 2000;

// How long a worker that fails between a launch and its results waits for the launch to end.
constexpr std::chrono::seconds kToEndLaunch(10);

constexpr int kMostThreads = 1024;  // most threads of a replica: each is really started

strategy::StrategySettings checked(strategy::StrategySettings settings) {
  std::set<std::string> seen;
  for (const auto& device : settings.devices) {
    if (!settings.programs) strategy::check_device(device);
    if (!seen.insert(device).second) throw InvalidArgument(text("device ", device, " is named twice"));
  }
  if (settings.threads_per_replica < 0 || settings.threads_per_replica > kMostThreads) {
    throw InvalidArgument(text("threads_per_replica is ", settings.threads_per_replica,
                               "; it must be from 0 (a share of the cores) to ", kMostThreads));
  }
  if (!(settings.timeouts.step > 0)) {
    throw InvalidArgument(text("timeout_seconds is ", settings.timeouts.step, "; it must be above 0"));
  }
  if (settings.threads_per_replica == 0) {
    settings.threads_per_replica =
        std::max(1, settings.partition.usable_cpu_count() / static_cast<int>(settings.devices.size()));
  }
  if (settings.workers) {
    const auto computing = settings.threads_per_replica * static_cast<int>(settings.devices.size());
    settings.workers->group.timeout_seconds = settings.timeouts.start;
    settings.workers->group.lost_host_seconds = settings.timeouts.lost_host;
    settings.workers->buckets.idle_cores = computing < settings.partition.usable_cpu_count();
  }
  return settings;
}

// Returns the topology without the processes of `workers`, who find each other later.
Topology topology_of(const strategy::StrategySettings& settings) {
  auto topology = settings.parallelism != nullptr ? settings.parallelism->topology() : Topology();
  topology.replicas = static_cast<int>(settings.devices.size());
  topology.replicas_in_step = settings.replicas_in_step;
  topology.came_later = settings.workers && settings.workers->membership && settings.workers->membership->is_newcomer();
  topology.may_be_chief = settings.servers == nullptr || settings.servers->is_chief();
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
  if (parallelism() == nullptr)
    topology_.train_with({membership()->group(settings_.workers->group), settings_.timeouts.step, "worker"});
  if (settings_.partition.size > 1) pin_current_thread(settings_.partition.cpus());
  topology_.all.check_all_agree("strategies", describe());
  seed_ = std::stoull(topology_.all.broadcast(std::to_string(seed_)));
  if (programs() != nullptr) {
    watch_.emplace(topology_.all.with_group(membership()->group(settings_.workers->group)),
                   [devices = programs()](const std::string& reason) { devices->fail_waiters(reason); });
  }
}

StrategyImpl::~StrategyImpl() {
  if (membership() != nullptr) membership()->leave();
}

std::string StrategyImpl::describe() const {
  const auto& [membership, group, buckets, shard_state, elastic, compare_copies_every, replace_differing] =
      *settings_.workers;
  return text("Lockstep ", version(), "\nLibTorch ", TORCH_VERSION, "\nnumber of replicas ", replicas(),
              "\ngradient_dtype ", buckets.gradient_dtype ? name_of(*buckets.gradient_dtype) : "none",
              "\nbucket_cap in bytes ", buckets.bucket_bytes, "\nfirst_bucket in bytes ", buckets.first_bucket_bytes,
              "\nshard_optimizer_state ", shard_state ? "true" : "false", "\ncompare_copies_every ",
              compare_copies_every, "\nreplace_differing_copies ", replace_differing ? "true" : "false",
              "\nelastic.min_workers ", elastic ? std::to_string(elastic->min_workers) : "none",
              "\nelastic.worker_batch.learning_rate_workers ",
              settings_.worker_batch ? std::to_string(settings_.worker_batch->learning_rate_workers) : "none",
              programs() != nullptr ? "\n" + programs()->describe() : "",
              parallelism() != nullptr ? "\n" + parallelism()->describe() : "");
}

std::vector<std::vector<at::Tensor>> StrategyImpl::results(ops::LaunchedProgram& launched,
                                                           const std::function<void()>& meanwhile) {
  try {
    if (meanwhile) meanwhile();
  } catch (const PeerLost&) {  // its devices do not compute the program any more
    throw;
  } catch (const Aborted&) {  // another worker has failed, and told this one
    await(launched);
    throw;
  } catch (const std::exception& error) {
    if (topology_.all.size() > 1) {
      tell_failure(error);
      topology_.all.abort(error.what());
    }
    await(launched);
    throw;
  }
  try {
    auto results = launched.results(deadline(), watch_ ? [this] { watch_->check(); } : std::function<void()>());
    count_run();
    return results;
  } catch (const Aborted&) {
    await(launched);
    throw;
  }
}

// Waits for a program, so that its variables are kept: all workers have launched it, so it ends in spite of a failure.
void StrategyImpl::await(ops::LaunchedProgram& launched) {
  try {
    launched.results(Deadline::after(kToEndLaunch), {});
  } catch (const std::exception&) {
  }
}

void StrategyImpl::check_same_program(const std::string& name, const std::vector<at::Tensor>& inputs,
                                      const ops::CompiledProgram& program) const {
  if (topology_.all.size() == 1) return;
  std::string shapes;
  for (const auto& input : inputs) shapes += text(" ", input.scalar_type(), " ", input.sizes());
  topology_.all.check_all_agree(text("programs of ", name),
                                text("inputs", shapes, "\na program with the hash ", program.hash()));
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
  gradient::GradientPathOptions options{.exchange = settings_.exchange, .root = settings_.root};
  if (settings_.workers) {
    options.buckets = settings_.workers->buckets;
    options.shard_state = settings_.workers->shard_optimizer_state;
    options.compare_copies_every = settings_.workers->compare_copies_every;
    options.replace_differing_copies = settings_.workers->replace_differing_copies;
    if (is_elastic()) {
      options.elastic.emplace(
          gradient::ElasticRanks{.is_newcomer = topology_.is_newcomer(), .hosts = [this] { return hosts(); }});
    }
  }
  options.devices = settings_.programs;
  if (servers() == nullptr) {
    if (!strategy::embeddings_of(*parameters, 0).empty()) {
      throw InvalidArgument(
          "a ShardedEmbedding needs ParameterServerStrategy, whose servers have its rows; with other strategies use "
          "Embedding");
    }
    return std::make_shared<GradientPath>(std::move(parameters), optimizer, options);
  }
  const auto& ranks = optimizer.options().gradient_ranks;
  if (ranks && ranks->ranks.size() > 1) {
    throw InvalidArgument(
        "the optimizer's gradients are summed with those of other processes, and parameter servers sum those of all "
        "workers; take one or the other");
  }
  parameters->update_trainable();
  const std::shared_ptr<parameter_server::Client> client = servers()->make_model(
      {.variables = strategy::variables_of(*parameters), .tables = strategy::tables_of(*parameters)}, optimizer);
  options.remote = std::make_shared<strategy::ServerValues>(*parameters, client, settings_.timeouts.step);
  auto path = std::make_shared<GradientPath>(std::move(parameters), optimizer, options);
  if (servers()->is_chief() && !servers()->was_trained(*client)) path->remote()->store(deadline());
  return path;
}

std::vector<std::string> StrategyImpl::hosts() const {
  const auto& processes = membership()->members().processes;
  const auto row = static_cast<std::size_t>(topology_.row_size);
  std::vector<std::string> hosts;
  for (auto rank = static_cast<std::size_t>(topology_.part); rank < processes.size(); rank += row)
    hosts.push_back(processes[rank].host);
  return hosts;
}

std::vector<std::shared_ptr<GradientPath>> StrategyImpl::paths_of_loops() {
  std::vector<std::shared_ptr<GradientPath>> paths;
  std::erase_if(paths_of_loops_, [](const auto& path) { return path.expired(); });
  for (const auto& path : paths_of_loops_) paths.push_back(path.lock());
  return paths;
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
  const bool in_host_memory = replicas() > 1 || servers() != nullptr || topology_.is_split ||
                              (settings_.workers && settings_.workers->shard_optimizer_state);
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
  membership()->regroup(change, Deadline::after(std::chrono::duration<double>(settings_.timeouts.regroup)));
  if (!change.leaves) take_group();
}

void StrategyImpl::join() {
  membership()->take_place();
  take_group();
}

void StrategyImpl::take_group() {
  auto options = settings_.workers->group;
  options.timeout_seconds = settings_.timeouts.regroup;
  if (parallelism() != nullptr)
    parallelism()->regroup(options.timeout_seconds);
  else
    topology_.all.regroup(membership()->group(options));
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

// Tells the reason before the Groups are aborted: whoever notices that finds the reason.
void StrategyImpl::tell_failure(const std::exception& error) const {
  if (watch_) watch_->abort(error.what());
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
