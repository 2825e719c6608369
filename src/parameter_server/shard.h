// One shard on its server: values, optimizer state, and the steps that moved them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "lockstep/collective/group.h"
#include "lockstep/optimizer/optimizer.h"
#include "parameter_server/applied_steps.h"

namespace lockstep::parameter_server {

// Throws InvalidArgument for what needs the whole gradient: clipping by a norm, and a loss scale.
void require_shardable(const Optimizer& optimizer);

// The update after `updates_before` others; `learning_rate`: instead of the optimizer's own. Throws InvalidArgument for
// a rate that is none.
UpdateStep next_update(const Optimizer& optimizer, std::int64_t updates_before, std::optional<double> learning_rate);

// Any thread may call; calls follow one another.
class Shard {
 public:
  // `values`: memory for `count` elements of `dtype` (float32 or float64), which are the first values. Throws as
  // require_shardable.
  Shard(Memory values, std::size_t count, DType dtype, Optimizer optimizer);

  std::size_t count() const { return count_; }
  DType dtype() const { return dtype_; }
  std::size_t bytes() const { return count_ * size_of(dtype_); }

  // Moves the values by the sum of the gradients, added in their order, divided by `divide_by`; each has count()
  // elements of dtype(). A step without gradients counts and moves nothing. Returns false, and does nothing, where
  // `step` was applied before. `learning_rate`: instead of the optimizer's own for this update. Throws
  // InvalidArgument for a rate that is none; then nothing has changed.
  bool apply(std::int64_t step, std::span<const std::byte* const> gradients, double divide_by,
             std::optional<double> learning_rate = {});

  // No step below `end` comes any more, but those that have been applied.
  void close_below(std::int64_t end);

  // Copies the values, as some number of whole updates left them, unless their version is `known`. Returns their
  // version, which is new with each change. No other shard has this version, also on a server that is started again.
  // Never kNoVersion.
  static constexpr std::int64_t kNoVersion = 0;
  std::int64_t read(std::byte* values, std::int64_t known = kNoVersion) const;

  // Replaces the values. Optimizer state and the steps that were applied stay.
  void write(const std::byte* values);

  // The number of steps that were applied.
  std::int64_t steps() const;

  // A checkpoint keeps this of the shard.
  struct State {
    std::vector<std::byte> values;
    std::vector<std::vector<std::byte>> optimizer = {};  // by the rule's states()
    std::int64_t updates = 0;                            // steps that were applied
  };

  // Copies the shard. Until `take_cut`, steps below `end` update the copy too, and later ones do not. Another cut takes
  // the place of this one.
  void cut(std::int64_t end);

  // The copy, when all steps below `end` have been applied: no other one of them is applied from now on. `end` may be
  // below that of the cut. Nothing where there was no cut.
  std::optional<State> take_cut(std::int64_t end);

  // Replaces everything: no step below `end` comes any more. Throws InvalidArgument where the sizes
  // are others; then nothing has changed.
  void restore(const State& state, std::int64_t end);

  // Send everything but a cut to a shard of this kind on another server. `send` sends a copy, so that the shard may be
  // read meanwhile. Where `receive` throws, what it has begun to replace is not whole.
  void send(StateWriter& to) const;
  void receive(StateReader& from);

 private:
  void check(const State& state) const;

  struct Data {
    Memory values;
    std::vector<Memory> state;  // by the rule's states()
    AppliedSteps applied;
    std::int64_t version = kNoVersion;  // of the values
  };
  void apply(Data& data, std::int64_t step, std::span<const std::byte* const> gradients, double divide_by,
             std::optional<double> learning_rate) const;
  template <class T>
  void update(const Data& data, std::span<const std::byte* const> gradients, double divide_by,
              const UpdateStep& step) const;

  const std::size_t count_;
  const DType dtype_;
  const Optimizer optimizer_;

  mutable Mutex mutex_;
  Data data_ LOCKSTEP_GUARDED_BY(mutex_);
  std::optional<Data> cut_ LOCKSTEP_GUARDED_BY(mutex_);
  std::int64_t end_of_cut_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // steps below this one update the cut too
};

}  // namespace lockstep::parameter_server
