// DistributedDataParallel for a LibTorch loop of your own: a copy of the module in every process, gradients averaged
// while backward goes on. Follows torch.nn.parallel.DistributedDataParallel.
//
//   lockstep::DistributedDataParallel ddp(net, group);  // net: a module holder or a shared_ptr, the same on all ranks
//   torch::optim::Adam adam(ddp->parameters());
//
//   adam.zero_grad();
//   torch::cross_entropy_loss(ddp(x), y).backward();  // after it the gradients are the mean over all ranks
//   adam.step();
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/gradient/gradient_hook.h"
#include "lockstep/gradient/recorded_forward.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

struct DistributedDataParallelOptions {
  double bucket_cap_mb = 25;
  double first_bucket_mb = 1;

  // After every backward with gradients averaged all ranks get rank 0's buffers (BatchNorm's statistics).
  bool broadcast_buffers = true;

  // A backward counts by the examples of all forwards that it goes through. A forward's examples are the size of
  // dimension `batch_dim` of the first tensor among its inputs that has this dimension. So ragged last batches give the
  // mean over all examples. Numbers, strings and empty values before the tensor are passed over; tuples, pairs and
  // arrays are looked into. Where another input comes first, such as a vector or a struct, `add_examples` must tell. A
  // backward whose examples are not known throws InvalidArgument. Off: every backward counts the same, as in PyTorch.
  bool weigh_by_examples = true;
  std::int64_t batch_dim = 0;  // 1 for [time, batch, features]

  // DType::float16, DType::bfloat16, or DType::int8 (blocks of 256 with a scale, and error feedback), in which float
  // gradients are sent. They are summed in float32.
  std::optional<DType> gradient_dtype = {};

  // How long an operation between the ranks waits for the others; empty: as long as the Communicator's calls.
  std::optional<double> timeout_seconds = {};

  // The order of an earlier training, from bucket_order(): a resumed one then has the same bits.
  std::vector<std::int64_t> bucket_order = {};

  // Instead of all_reduce; see gradient_hook.h.
  GradientHook comm_hook = {};
};

namespace internal {

// A step that ranks make together after each backward, such as a sharded optimizer's.
class CollectiveStep {
 public:
  virtual ~CollectiveStep() = default;
  virtual void step() = 0;
};

}  // namespace internal

// The work of DistributedDataParallel, for modules whose forward it does not know.
class DistributedGradients {
 public:
  // Gives all ranks rank 0's parameters and buffers. Throws InvalidArgument, on all ranks, naming a parameter that
  // differs in shape or dtype, or in whether it requires a gradient. Parameters that require no gradient are not
  // reduced. So wrap the module anew after a frozen parameter requires a gradient, and after a layer was added. Else a
  // forward, or the first backward that reaches the parameter, throws InvalidArgument. Collective.
  DistributedGradients(std::shared_ptr<torch::nn::Module> module, Communicator ranks,
                       DistributedDataParallelOptions options);
  ~DistributedGradients();

  // Backwards that come before this object ends only accumulate on this rank.
  class NoSync {
   public:
    explicit NoSync(DistributedGradients& gradients);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    DistributedGradients& gradients_;
    const bool before_;
  };

  // Backwards while this lives add to the gradients and send nothing. The next one averages: the gradient is the number
  // of all these backwards times the mean over their examples of all ranks. So divide each loss, which is a mean, by
  // that number. Follows torch's DistributedDataParallel.no_sync, where ragged backwards count alike.
  [[nodiscard]] NoSync no_sync() { return NoSync(*this); }

  // Runs a loop whose number of steps may differ between ranks. A rank that is done takes part in the others' steps,
  // with no examples, until all are done. Then all get the parameters and buffers of one that made the most steps.
  // Collective. Not for modules with synchronized batch normalization, whose layers wait for every rank.
  void join(const std::function<void()>& loop);

  // Adds to the number of examples for which the next backward counts on this rank, beside the examples of forwards
  // that were made through DistributedDataParallel. Calls since the last backward add up. Another backward of the same
  // graph counts as much. Ignored where gradients are off.
  void add_examples(double examples);

  // Call it before each forward. Collective after a regroup. Throws Error where the last backward was interrupted and
  // the ranks are still the same. Throws InvalidArgument where a parameter requires a gradient that would not be
  // reduced, and where a later wrapper has taken the gradients.
  void prepare();

  // Calls `prepare`, and begins a forward, whose operators are recorded until the result ends. `examples`: how many the
  // forward's inputs have; empty where they do not tell. Throws as `prepare`.
  internal::RecordedForward begin_forward(std::optional<double> examples);

  std::vector<std::int64_t> bucket_order() const;
  const Group& group() const;
  const Communicator& ranks() const;

  // The module's parameters that require gradients; tied ones once.
  const std::vector<at::Tensor>& trained_parameters() const;

  // In `join`, a rank that is done runs `step` too whenever the others do, as long as `step` lives.
  void join_steps_of(std::weak_ptr<internal::CollectiveStep> step);

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

// After Communicator::regroup (job.h has an example) the next forward gives all ranks rank 0's parameters and buffers,
// as construction does. The caller broadcasts rank 0's optimizer state and place in the loop. One rank may have made
// the step in which another heard of the loss. On GPUs such a loop calls Group::synchronize between backward and the
// optimizer's step, which else might use sums that failed.
//
// One thread a rank. Call the module through this: `ddp(x)`, or `ddp.forward(x)`. `ddp->forward(x)` is the module's own
// forward, of which this object does not know. The module is shared, not copied. Each backward with sync on is one step
// of all ranks. In a step parameters may be unused on some ranks or on all; their gradients stay undefined where no
// rank has one. Gradients are views of memory that the next step overwrites.
template <class M>
class DistributedDataParallel : public DistributedGradients {
 public:
  DistributedDataParallel(std::shared_ptr<M> module, Communicator ranks, DistributedDataParallelOptions options = {})
      : DistributedGradients(module, std::move(ranks), options),
        module_(std::move(module)),
        batch_dim_(options.batch_dim) {}

  template <class Holder>
  requires std::is_same_v<typename Holder::ContainedType, M> DistributedDataParallel(
      const Holder& module, Communicator ranks, DistributedDataParallelOptions options = {})
      : DistributedDataParallel(module.ptr(), std::move(ranks), std::move(options)) {}

  // The module's forward.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    const auto forward = begin_forward(internal::examples_in(batch_dim_, inputs...));
    return forward.result(module_->forward(inputs...));
  }
  template <class... Inputs>
  auto forward(const Inputs&... inputs) {
    return (*this)(inputs...);
  }

  M* operator->() const { return module_.get(); }
  M& operator*() const { return *module_; }

 private:
  const std::shared_ptr<M> module_;
  const std::int64_t batch_dim_;
};

template <class Holder>
DistributedDataParallel(const Holder&, Communicator, DistributedDataParallelOptions = {})
    -> DistributedDataParallel<typename Holder::ContainedType>;

template <class M>
DistributedDataParallel(std::shared_ptr<M>, Communicator, DistributedDataParallelOptions = {})
    -> DistributedDataParallel<M>;

}  // namespace lockstep
