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
// but for what says otherwise.
class Updater {
 public:
  Updater(std::shared_ptr<ReplicatedParameters> parameters, Optimizer optimizer, ShardMap shards);

  const Optimizer& optimizer() const { return optimizer_; }

  // Fixes the learning rate of the coming update. By one replica, before the barrier that comes before `update`.
  void begin_step();

  // Clips what `gradients` sums, divided by `divide_by`, and moves this replica's shards in all written copies. Throws
  // what the Groups throw.
  void update(const GradientSync& gradients, double divide_by, const Group& replicas, Deadline deadline);

  // Updates that were made. Written by one replica between two barriers.
  std::int64_t iterations() const { return iterations_; }
  void set_iterations(std::int64_t iterations) {
    iterations_ = iterations;
    remembered_.reset();
  }
  void count_step() { ++iterations_; }

  // What losses are multiplied by before backward. Written likewise; constant while replicas run backward.
  LossScale& loss_scale() { return loss_scale_; }
  const LossScale& loss_scale() const { return loss_scale_; }

  // The rate of the next update. One that is set holds until another is.
  double learning_rate() const;
  void set_learning_rate(double rate);
  std::optional<double> learning_rate_override() const { return rate_override_; }
  void restore_learning_rate(std::optional<double> override_rate) { rate_override_ = override_rate; }

  // State `index` (of the rule's states()) of what is owned of the parameter: a view of the stored values, in the
  // parameter's shape where all of it is owned, else flat.
  at::Tensor state(std::size_t slot, std::size_t index) const;

  // What is owned of the parameter, in the place of all of it: in its shape where that is all, else flat.
  at::Tensor owned_part(std::size_t slot, const at::Tensor& whole) const;

  std::int64_t state_bytes() const;

  // By its hash. True before the first call, and after set_iterations.
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
                    int written_copies);
  template <class T>
  T* summed(const Shard& shard) const;
  std::uint64_t hash_of_state() const;
  void place_state();
  std::int64_t place_of(const Shard& shard) const;

  // Constant after construction.
  const std::shared_ptr<ReplicatedParameters> parameters_;
  const Optimizer optimizer_;
  const ShardMap shards_;

  // What is owned of a slot, and where its state lies in the flat buffers.
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
  UpdateStep step_;  // of the current update
};

}  // namespace lockstep::gradient
