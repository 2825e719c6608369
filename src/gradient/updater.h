// The optimizer of a model: the state of the shards that this process owns, and their update. The state is stored once
// for all replicas; on GPUs, where each replica updates its own copy of the values, once a replica.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "gradient/device_update.h"
#include "gradient/parameter_parts.h"
#include "gradient/reduction.h"
#include "gradient/replicated_parameters.h"
#include "gradient/shard_state.h"
#include "lockstep/optimizer/optimizer.h"
#include "optimizer/flat_update.h"

namespace lockstep::gradient {

// The factor of LossScaleOptimizer while it trains. Without options always 1. Else between 1 (or the initial scale, if
// that is less) and 2^64: float could not hold a larger divisor of gradients. One thread at a time.
class LossScale {
 public:
  explicit LossScale(const std::optional<LossScaleOptions>& options) : options_(options) { restart(); }

  bool used() const { return options_.has_value(); }
  double value() const { return value_; }
  std::int64_t steps() const { return steps_; }      // updates since the value moved
  std::int64_t skipped() const { return skipped_; }  // steps in all whose gradients were not finite

  // Called after each step with whether its gradients were finite. Returns false where they were not, even with the
  // smallest scale.
  bool move(bool finite) {
    if (!used()) return true;
    if (!finite) ++skipped_;
    const bool doubles = finite && ++steps_ >= options_->dynamic_growth_steps;
    if (finite && !doubles) return true;
    const double least = std::min(1.0, options_->initial_scale), before = value_;
    value_ = std::clamp(value_ * (doubles ? 2 : 0.5), least, kMost);
    steps_ = 0;
    return finite || before > least;
  }
  void restore(double value, std::int64_t steps, std::int64_t skipped) {
    value_ = value;
    steps_ = steps;
    skipped_ = skipped;
  }
  void restart() { restore(options_ ? options_->initial_scale : 1, 0, 0); }

 private:
  static constexpr double kMost = 18446744073709551616.0;  // 2^64

  std::optional<LossScaleOptions> options_;
  double value_ = 1;
  std::int64_t steps_ = 0, skipped_ = 0;
};

// `update` is called by every replica's thread at once; everything else by one thread while no replica is in a step,
// unless its comment says otherwise.
class Updater {
 public:
  // Has the state of ownership.own() and ownership.copies(). `ownership` belongs to a reduction, which must outlive
  // this object; its value may change between steps, before exchange_states. `commits`: processes of an elastic job
  // that wait for each other before each update. When one goes on, all have all that their updates need. So each can
  // complete its own update where others have begun theirs.
  Updater(std::shared_ptr<ReplicatedParameters> parameters, Optimizer optimizer, const Ownership& ownership,
          std::optional<Communicator> commits = {});

  bool commits() const { return commits_.has_value(); }

  const Optimizer& optimizer() const { return optimizer_; }
  const Ownership& ownership() const { return ownership_; }

  // The number and the learning rate of the update that comes after `ahead` others.
  UpdateStep step_after(std::int64_t ahead) const;

  // Sets the learning rate of the next update. Called by one replica, before the barrier that precedes `update`. Throws
  // Error after an update that broke off, until a whole state is loaded.
  void begin_step();
  void tell_broke_off();     // values and state may be of no step, or of two
  void tell_state_loaded();  // values are told by ReplicatedParameters::assignments

  // Divides the sums by `divide_by`, clips them, and updates this replica's shards in the copies that an owner writes,
  // after a barrier of those that commit. Throws what the Groups throw.
  void update(const Sums& sums, double divide_by, const Group& replicas, Deadline deadline);

  // Makes the update, for all replicas, that threw in that barrier though others have passed the barrier. Throws Error
  // where there is none.
  void complete();

  // The number of updates so far. Written by one replica between two barriers.
  std::int64_t iterations() const { return iterations_; }
  void set_iterations(std::int64_t iterations) {
    iterations_ = iterations;
    remembered_.reset();
  }
  void count_step() {
    ++iterations_;
    prepared_.reset();
  }

  // True where gradients are finite on all workers of a model that is split. `finite`: on this worker and on those that
  // have the same parts. Collective, where losses are scaled.
  bool all_finite(bool finite) const {
    return parameters_->is_split() && loss_scale_.used() ? !parameters_->topology().all.any(!finite) : finite;
  }

  // Losses are multiplied by it before backward. Written like iterations(); constant while replicas run backward.
  LossScale& loss_scale() { return loss_scale_; }
  const LossScale& loss_scale() const { return loss_scale_; }

  // The rate of the next update. A rate that was set holds until another is set.
  double learning_rate() const { return learning_rate_after(0); }
  void set_learning_rate(double rate);
  void set_learning_rate_factor(double factor) { rate_factor_ = factor; }  // of all that follows
  std::optional<double> learning_rate_override() const { return rate_override_; }
  void restore_learning_rate(std::optional<double> override_rate) { rate_override_ = override_rate; }

  // State `index` (of the rule's states()) of this process's shard of the parameter, in the parameter's shape where the
  // whole parameter is owned, else flat. A view of the stored values; where replicas have their own shards, a copy in
  // host memory.
  at::Tensor state(std::size_t slot, std::size_t index) const;

  // Returns pairs: copying each second to its first gives this process its part of `whole`, state `index` of the slot,
  // on all its replicas.
  std::vector<std::pair<at::Tensor, at::Tensor>> parts_of(std::size_t slot, std::size_t index,
                                                          const at::Tensor& whole) const;

  // The whole of state `index` of the parameter on rank 0; elsewhere undefined, or the same. Collective over the
  // processes where the state is sharded.
  at::Tensor whole_state(std::size_t slot, std::size_t index) const;

  std::int64_t state_bytes() const {  // of a replica that has its own, else of this process
    return states_.own.bytes() + states_.copies.bytes();
  }

  // The state of the shards that this process owns, and of those of another process, which it updates as well so that
  // they are not lost with that process.
  struct States {
    ShardState own, copies;
  };
  States initial_states() const;
  const States& states() const { return states_; }
  States exchange_states(States states);

  // Gives the other replicas the state of replica 0, where each has its own of all elements.
  void spread_state();

  // Compares hashes. True before the first remember_state, and after set_iterations.
  void remember_state() { remembered_ = hash(); }
  bool state_is_as_remembered() const { return !remembered_ || *remembered_ == hash(); }

 private:
  // Constant while replicas update.
  struct Prepared {
    Sums sums;
    double divide_by = 1;
    std::vector<double> squares;  // [slot]: of the sums' norms, where the optimizer clips by them
    double all_squares = 0;       // their sum over the model
  };

  // One replica's shards of the parameters of a dtype, and the numbers of their slots.
  struct ShardsOnDevice {
    std::vector<std::size_t> slots;
    DeviceParameters parameters;
  };

  double learning_rate_after(std::int64_t ahead) const;
  void put_numbers(int replica);
  void update_on_device(int replica, const Sums& sums, double divide_by, Deadline deadline);
  void update_own_copy(int replica, const Sums& sums, double divide_by, Deadline deadline);
  void require_restored();
  void clip_on_device(int replica, const Sums& sums, std::map<at::ScalarType, ShardsOnDevice>& all,
                      Deadline deadline) const;
  ShardMap shards_of(int replica) const;
  const ShardState& state_of(int replica) const {
    return replica == 0 ? states_.own : other_states_[static_cast<std::size_t>(replica) - 1];
  }
  std::uint64_t hash() const;
  void sum_and_square(Prepared& prepared, const Group& replicas, Deadline deadline);
  void update_shards(int replica, const Prepared& prepared);
  std::span<const at::Tensor> written(at::ScalarType dtype) const;
  double norm_factor(const Prepared& prepared, std::size_t slot) const;

  // Calls act(T(), shard, parts) for each of the replica's shards in `states` that anybody has a gradient for.
  template <class Act>
  void for_each_shard(const ShardState& states, int replica, const Sums& sums, const Act& act) const;
  template <class T>
  void update_shard(const ShardState& states, const Shard& shard, const std::vector<const T*>& gradients,
                    const optimizer::GradientScale& scale) const;

  // Constant after construction.
  const std::shared_ptr<ReplicatedParameters> parameters_;
  const Optimizer optimizer_;
  const Ownership& ownership_;
  const std::optional<Communicator> commits_;
  const SlotGroups parts_;  // of a model that is split

  States states_;
  struct OnDevice {
    DeviceUpdate update;
    std::vector<at::Tensor> numbers;  // scalars on the device
  };
  // Placement::device only:
  std::vector<std::map<at::ScalarType, OnDevice>> device_updates_;  // [replica], of the dtypes that there are
  std::vector<ShardState> other_states_;                            // of replicas 1, 2, ...

  std::optional<std::uint64_t> remembered_;
  // After an update on a device that broke off, until values and state are loaded.
  struct Broken {
    std::int64_t assigned;  // values, so far
    bool lacks_state = true;
  };
  Mutex breaking_;  // several replicas may tell of the same update
  std::optional<Broken> broken_ LOCKSTEP_GUARDED_BY(breaking_);
  std::int64_t iterations_ = 0;
  LossScale loss_scale_;
  std::optional<double> rate_override_;
  double rate_factor_ = 1;

  // The current update; written by replica 0.
  std::optional<Prepared> prepared_;  // empty once processes that commit have passed their barrier
  UpdateStep step_;
};

}  // namespace lockstep::gradient
