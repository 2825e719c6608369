// The optimizer of a model: the state of the shards that this process owns, stored once for all replicas, and their
// update.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "gradient/device_update.h"
#include "gradient/gradient_sync.h"
#include "gradient/loss_scale.h"
#include "gradient/replicated_parameters.h"
#include "gradient/shard_map.h"
#include "lockstep/optimizer/optimizer.h"
#include "optimizer/flat_update.h"

namespace lockstep::gradient {

// `update` is called by every replica's thread at once; everything else by one thread while no replica is in a step,
// unless its comment says otherwise.
class Updater {
 public:
  Updater(std::shared_ptr<ReplicatedParameters> parameters, Optimizer optimizer, ShardMap shards);

  const Optimizer& optimizer() const { return optimizer_; }

  // Sets the learning rate of the next update. Called by one replica, before the barrier that precedes `update`.
  void begin_step();

  // Divides the sums of `gradients` by `divide_by`, clips them, and updates this replica's shards in all written
  // copies. Throws what the Groups throw.
  void update(const GradientSync& gradients, double divide_by, const Group& replicas, Deadline deadline);

  // The number of updates so far. Written by one replica between two barriers.
  std::int64_t iterations() const { return iterations_; }
  void set_iterations(std::int64_t iterations) {
    iterations_ = iterations;
    remembered_.reset();
  }
  void count_step() { ++iterations_; }

  // Losses are multiplied by it before backward. Written like iterations(); constant while replicas run backward.
  LossScale& loss_scale() { return loss_scale_; }
  const LossScale& loss_scale() const { return loss_scale_; }

  // The rate of the next update. A rate that was set holds until another is set.
  double learning_rate() const;
  void set_learning_rate(double rate);
  void set_learning_rate_factor(double factor) { rate_factor_ = factor; }  // of all that follows
  std::optional<double> learning_rate_override() const { return rate_override_; }
  void restore_learning_rate(std::optional<double> override_rate) { rate_override_ = override_rate; }

  // State `index` (of the rule's states()) of this process's shard of the parameter: a view of the stored values, in
  // the parameter's shape where all of it is owned, else flat.
  at::Tensor state(std::size_t slot, std::size_t index) const;

  // This process's shard of `whole`: in the parameter's shape where the shard is all of it, else flat.
  at::Tensor owned_part(std::size_t slot, const at::Tensor& whole) const;

  std::int64_t state_bytes() const;

  // Compares hashes. True before the first remember_state, and after set_iterations.
  void remember_state() { remembered_ = hash_of_state(); }
  bool state_is_as_remembered() const { return !remembered_ || *remembered_ == hash_of_state(); }

 private:
  void update_on_device(const GradientSync& gradients, double divide_by);
  void update_clipped_by_norm(const GradientSync& gradients, double divide_by, const Group& replicas,
                              Deadline deadline);
  double norm_factor(const std::vector<double>& squares, std::size_t slot) const;

  // Calls act(T(), shard, sources) for each of the replica's shards that anybody has a gradient for.
  template <class Act>
  void for_each_shard(int replica, const GradientSync& gradients, const Act& act) const;
  template <class T>
  void update_shard(const Shard& shard, const std::vector<const T*>& gradients, const optimizer::GradientScale& scale,
                    const GradientSync& sync);
  template <class T>
  T* summed(const Shard& shard) const;
  std::uint64_t hash_of_state() const;
  void place_state();
  std::int64_t place_of(const Shard& shard) const;

  // Constant after construction.
  const std::shared_ptr<ReplicatedParameters> parameters_;
  const Optimizer optimizer_;
  const ShardMap shards_;

  // The owned shard of a slot, and where its state lies in the flat buffers.
  struct Owned {
    std::int64_t begin = 0, count = 0, place = 0;
  };
  std::vector<Owned> owned_;                            // [slot]
  std::vector<at::Tensor> state_float_, state_double_;  // [state], flat
  at::Tensor summed_float_, summed_double_;             // flat; for clipping by norm
  std::vector<DeviceUpdate> device_updates_;            // float's and double's; Placement::device only

  std::optional<std::uint64_t> remembered_;
  std::int64_t iterations_ = 0;
  LossScale loss_scale_;
  std::optional<double> rate_override_;
  double rate_factor_ = 1;
  UpdateStep step_;  // of the current update
};

}  // namespace lockstep::gradient
