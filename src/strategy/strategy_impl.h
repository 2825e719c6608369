// The implementation of Strategy: its decisions, its workers, this process's replicas, and their random numbers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/hash.h"
#include "lockstep/base/random.h"
#include "lockstep/strategy/strategy.h"
#include "strategy/replicas.h"
#include "strategy/settings.h"
#include "strategy/unwrap.h"
#include "strategy/workers.h"

namespace lockstep::strategy {

// Does what internal::replicate_modules does, with the random numbers of `seed`.
std::shared_ptr<ReplicatedParameters> replicate_modules(StrategyImpl& strategy, std::uint64_t seed,
                                                        const internal::MakeModule& make);

// The seeds of replicas' random numbers in a strategy's runs, which are numbered.
class RunSeeds {
 public:
  // All workers take the chief's. Collective.
  void share(const Communicator& workers) { seed_ = std::stoull(workers.broadcast(std::to_string(seed_))); }

  // Returns the seed of the next run, in which a replica's is its mix with the replica's number.
  std::uint64_t next() { return mix(seed_, ++runs_); }

  // Returns the seed of a loop that numbers its runs. After `set` the next run, and some more, have the numbers of
  // `seed` and `number`, whatever ran before.
  std::uint64_t next_of_loop() { return mix(seed_, ++loops_); }
  void set(std::uint64_t seed, std::uint64_t number) {
    seed_ = seed;
    runs_ = number << 20;
  }

 private:
  std::uint64_t seed_ = next_random_seed();
  std::uint64_t runs_ = 0, loops_ = 0;
};

}  // namespace lockstep::strategy

namespace lockstep {

class StrategyImpl {
 public:
  // Throws InvalidArgument for a device that does not exist or is named twice. With workers it is collective, and
  // throws as make_group does.
  explicit StrategyImpl(strategy::StrategySettings settings);
  ~StrategyImpl();  // leaves the job

  const strategy::StrategySettings& settings() const { return settings_; }
  const strategy::Kind& kind() const { return *settings_.kind; }
  strategy::Workers& workers() { return workers_; }
  const strategy::Workers& workers() const { return workers_; }
  const Topology& topology() const { return workers_.topology(); }
  strategy::Replicas& replicas() { return replicas_; }
  const strategy::Replicas& replicas() const { return replicas_; }
  strategy::RunSeeds& seeds() { return seeds_; }

  // Returns the lines that must be the same for all workers.
  std::string describe() const;

  std::shared_ptr<GradientPath> make_gradient_path(const Optimizer& optimizer,
                                                   std::shared_ptr<ReplicatedParameters> parameters);

  // Returns the deadline of a replica's wait. It is later than that of workers for each other: a replica that waits for
  // one that waits for other workers hears from it which of them is late.
  Deadline deadline() const {
    constexpr double kForOtherWorkers = 2;
    const double seconds = settings_.timeouts.step + (topology().all.size() > 1 ? kForOtherWorkers : 0);
    return Deadline::after(std::chrono::duration<double>(seconds));
  }

  // Does what Replicas::run does, for a step, with each replica's own random numbers.
  void run(const std::function<void(ReplicaContext&)>& function);

  // Returns this process's replicas among those that share the strategy's data.
  internal::LocalReplicas local_replicas() const { return replicas_.among(topology()); }

  // Returns where variables live. With GPUs each has a copy; updates are made there, unless the host is to sum
  // gradients, or state is divided.
  gradient::Placement placement() const;

 private:
  const strategy::StrategySettings settings_;
  strategy::RunSeeds seeds_;
  strategy::Workers workers_;
  strategy::Replicas replicas_;
};

}  // namespace lockstep
