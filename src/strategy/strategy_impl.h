// The implementation of Strategy: devices, threads and the Group of the replicas; how variables are placed and updated.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/hash.h"
#include "base/timeouts.h"
#include "collective/refused_by_all.h"
#include "collective/topology.h"
#include "elastic/membership.h"
#include "elastic/sections.h"
#include "gradient/gradient_path.h"
#include "lockstep/base/random.h"
#include "lockstep/strategy/multi_worker_mirrored_strategy.h"
#include "lockstep/strategy/strategy.h"
#include "ops/replica_random.h"
#include "ops/traced_program.h"
#include "parameter_server/server_cluster.h"
#include "strategy/devices.h"
#include "strategy/model_parallelism.h"
#include "strategy/replica_threads.h"
#include "strategy/unwrap.h"
#include "strategy/worker_watch.h"

namespace lockstep::strategy {

// Does what internal::replicate_modules does, with the random numbers of `seed`.
std::shared_ptr<ReplicatedParameters> replicate_modules(StrategyImpl& strategy, std::uint64_t seed,
                                                        const internal::MakeModule& make);

// This process, as a worker among those that train together.
struct WorkerSettings {
  std::shared_ptr<elastic::Membership> membership;  // null: on a mesh that was made of a Communicator
  GroupOptions group;                               // but for how long is waited, which the settings' Timeouts say
  gradient::BucketOptions buckets;
  bool shard_optimizer_state = false;
  std::optional<ElasticOptions> elastic = {};
  std::int64_t compare_copies_every = 100;
  bool replace_differing_copies = false;
};

// The three decisions of a strategy, and the devices that these are for.
struct StrategySettings {
  std::vector<std::string> devices;  // one a replica
  int threads_per_replica = 0;       // 0: an equal share of the cores
  cluster::CpuPartition partition = {};
  gradient::Placement placement = gradient::Placement::mirrored;
  gradient::Exchange exchange = gradient::Exchange::one_pass;
  int root = 0;  // the replica that updates for all, with Exchange::reduction_to_one_device
  Timeouts timeouts = {};
  std::optional<WorkerBatch> worker_batch = {};
  std::optional<WorkerSettings> workers = {};                     // none: this process is alone
  std::shared_ptr<const ModelParallelism> parallelism = {};       // null: each worker has whole models
  std::shared_ptr<parameter_server::ServerCluster> servers = {};  // have the variables; null: there are none
  std::shared_ptr<ops::ProgramDevices> programs = {};  // devices that run compiled steps; null: threads run steps
  int replicas_in_step = 0;                            // replicas that compute a step together; 0: those of all workers
};

}  // namespace lockstep::strategy

namespace lockstep {

class StrategyImpl {
 public:
  // Throws InvalidArgument for a device that does not exist or is named twice. With workers it is collective, and
  // throws as make_group does.
  explicit StrategyImpl(strategy::StrategySettings settings);
  ~StrategyImpl();

  const strategy::StrategySettings& settings() const { return settings_; }
  int replicas() const { return topology_.replicas; }  // of this process

  // The processes that train together, and this one's place among them: the workers.
  const Topology& topology() const { return topology_; }

  const strategy::ModelParallelism* parallelism() const { return settings_.parallelism.get(); }

  // Returns true where training may go on without workers that are lost.
  bool is_elastic() const { return settings_.workers && settings_.workers->elastic; }

  // Calls act(). Where it throws, the calls of the other `ranks` are aborted with the reason, unless all of them throw
  // (RefusedByAll). Workers of an elastic strategy go on without this one, unless two fail in one section
  // (elastic/failures.h).
  template <class Act>
  void abort_on_error(const Communicator& ranks, const Act& act) const;
  template <class Act>
  void abort_on_error(const Act& act) const {
    abort_on_error(topology_.all, act);
  }

  // Does what collective::check_on_all does, over the workers. An elastic strategy calls check() alone: the others go
  // on without a worker that fails.
  void check_on_all(const std::function<void()>& check) const {
    if (is_elastic()) return check();
    collective::check_on_all(topology_.all, "worker", check);
  }

  // Goes on with the workers that remain and those that come: replaces the topology's Groups. Collective over them,
  // between runs. Throws what Membership::regroup and group throw; after an exception of `group` the job is of the next
  // generation.
  void regroup(const elastic::Change& change);

  // Takes the place that the workers have given this newcomer. Collective over them; they regroup.
  void join();

  // Returns the factor of an elastic strategy's rates, for as many workers as there are. Throws InvalidArgument where
  // the user's rule returns no positive number.
  double learning_rate_factor() const;

  // The workers, as processes of a job. Null for a process alone, and for a mesh that was made of a Communicator.
  elastic::Membership* membership() const { return settings_.workers ? settings_.workers->membership.get() : nullptr; }

  // Returns the lines that must be the same for all workers.
  std::string describe() const;

  // Returns seeds of the replicas' random numbers, for a loop that numbers its runs. After set_runs the next run, and
  // some more, have the numbers of `seed` and `number`, whatever ran before.
  std::uint64_t next_loop_seed() { return mix(seed_, ++loops_); }
  void set_runs(std::uint64_t seed, std::uint64_t number) {
    seed_ = seed;
    runs_ = number << 20;
  }

  // Returns the sections that this process has completed, in all trainings of this strategy.
  elastic::Sections::Completed& completed_sections() { return completed_sections_; }
  const elastic::Sections::Completed& completed_sections() const { return completed_sections_; }

  // Trainings that workers make are numbered, equally in all.
  std::int64_t next_training() { return trainings_++; }

  // Models whose steps are compiled are numbered in the same way as they are built, from 1.
  std::int64_t next_model() { return ++models_; }

  // Returns this process among those of a cluster with parameter servers, which have the variables; else null.
  parameter_server::ServerCluster* servers() const { return settings_.servers.get(); }

  // Returns the devices that run compiled steps of all replicas, which this process's threads then only give their
  // input; else null.
  ops::ProgramDevices* programs() const { return settings_.programs.get(); }

  // Returns the results of a program on these devices; calls `meanwhile` before it waits for them. Throws what
  // LaunchedProgram::results throws; what WorkerWatch::check throws, where another worker is lost or fails; and what
  // `meanwhile` throws, after telling the other workers, unless they told this one.
  std::vector<std::vector<at::Tensor>> results(ops::LaunchedProgram& launched,
                                               const std::function<void()>& meanwhile = {});

  // Throws InvalidArgument on all workers where they would launch different programs next. Collective over the workers.
  // `inputs`: like those of each replica.
  void check_same_program(const std::string& name, const std::vector<at::Tensor>& inputs,
                          const ops::CompiledProgram& program) const;

  std::shared_ptr<GradientPath> make_gradient_path(const Optimizer& optimizer,
                                                   std::shared_ptr<ReplicatedParameters> parameters) const;

  // With parameter servers: returns the paths that Strategy::optimizer made and that are still used, in their order.
  std::vector<std::shared_ptr<GradientPath>> paths_of_loops();
  void remember_path_of_loop(const std::shared_ptr<GradientPath>& path) { paths_of_loops_.push_back(path); }

  // Returns the deadline of a replica's wait. It is later than that of workers for each other: a replica that waits for
  // one that waits for other workers hears from it which of them is late.
  Deadline deadline() const {
    constexpr double kForOtherWorkers = 2;
    const double seconds = settings_.timeouts.step + (topology_.all.size() > 1 ? kForOtherWorkers : 0);
    return Deadline::after(std::chrono::duration<double>(seconds));
  }

  // Calls function(replica) on every replica's thread. When one throws, the Group is aborted so that the others leave
  // their collective operations, the first exception is rethrown, and a new Group takes the place of the old.
  void on_replicas(const std::function<void(int)>& function);

  // Does what on_replicas does, for a step, with each replica's own random numbers.
  void run(const std::function<void(ReplicaContext&)>& function);

  // Returns the seeds that `run` would give the replicas next, for a step that is compiled.
  std::vector<std::uint64_t> next_run_seeds();

  // Counts the `run`s, and compiled steps, that have ended. Any thread.
  std::uint64_t ended_runs() const { return ended_runs_.load(std::memory_order_relaxed); }

  c10::Device torch_device(int replica) const { return torch_devices_[static_cast<std::size_t>(replica)]; }
  const std::vector<c10::Device>& torch_devices() const { return torch_devices_; }
  internal::LocalReplicas local_replicas() const { return local_replicas(topology_); }
  internal::LocalReplicas local_replicas(const Topology& topology) const;

  // Returns where variables live: with GPUs, a copy on each; with several GPUs, updates are made in host memory.
  gradient::Placement placement() const;

  ops::ReplicaRandom& random(int replica) const { return *random_[static_cast<std::size_t>(replica)]; }

  // Return replica `replica`'s handle of the Group of this process's replicas, and of all workers'. All replicas make
  // the second when they first ask for it.
  const Group& local_group(int replica) const { return groups_[static_cast<std::size_t>(replica)]; }
  const Group& group(int replica) const;

 private:
  template <class Function>
  void on_threads(const Function& function);
  void take_group();
  std::vector<std::string> hosts() const;  // of topology().same_part: [rank]
  int spin_rounds() const;
  void make_groups();
  void fail(int replica) const;  // for the exception that is handled
  void tell_failure(const std::exception& error) const;
  static void await(ops::LaunchedProgram& launched);
  void count_run() { ended_runs_.fetch_add(1, std::memory_order_relaxed); }
  std::string here() const;  // the host's name, for messages

  const strategy::StrategySettings settings_;
  Topology topology_;
  std::vector<c10::Device> torch_devices_;                   // [replica]
  std::vector<std::unique_ptr<ops::ReplicaRandom>> random_;  // [replica]: used by that replica while it runs
  std::vector<Group> groups_;                                // [replica]
  mutable std::vector<std::optional<Group>> all_groups_;     // [replica]: all workers' replicas; that replica's own
  std::uint64_t seed_ = next_random_seed();
  std::uint64_t runs_ = 0, loops_ = 0;
  std::atomic<std::uint64_t> ended_runs_ = 0;
  std::int64_t trainings_ = 0;
  std::int64_t models_ = 0;
  elastic::Sections::Completed completed_sections_;
  std::vector<std::weak_ptr<GradientPath>> paths_of_loops_;
  strategy::ReplicaThreads threads_;
  std::optional<strategy::WorkerWatch> watch_;  // where devices run programs of several workers
};

template <class Act>
void StrategyImpl::abort_on_error(const Communicator& ranks, const Act& act) const {
  std::exception_ptr of_all;  // thrown on all workers, whose Group is whole
  ranks.abort_on_error([&] {
    try {
      act();
    } catch (const StateLost&) {
      of_all = std::current_exception();
    } catch (const Interrupted&) {  // thrown on all workers, after a whole step
      throw;
    } catch (const std::exception& error) {
      const auto* const refusal = dynamic_cast<const collective::RefusedByAll*>(&error);
      if (refusal != nullptr && refusal->is_of(ranks)) {
        of_all = std::current_exception();
        return;
      }
      tell_failure(error);
      throw;
    }
  });
  if (of_all) std::rethrow_exception(of_all);
}

}  // namespace lockstep
