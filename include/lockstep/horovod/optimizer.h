// Horovod's DistributedOptimizer, around an optimizer of LibTorch for a loop of your own, or around one of ours for
// fit. Include lockstep/horovod.h.
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/horovod.h"
#include "lockstep/optimizer/optimizer.h"

namespace torch {
template <typename Key, typename Value>
class OrderedDict;
}

namespace lockstep::horovod {

template <class Optimizer>
class DistributedOptimizer;

struct DistributedOptimizerOptions {
  Op op = Average;  // or Sum, of the ranks' gradients. A rank that has joined does not count in an average.
  Compression compression = Compression::none;

  // Gradients accumulate over this many backwards, undivided, before they are reduced over the ranks. A backward that
  // runs inside another one counts.
  int backward_passes_per_step = 1;

  ProcessSet process_set = {};  // the ranks that train together
};

// Gradients are reduced while backward goes on; after it the optimizer's parameters have the reduced gradients, and
// zeros where no rank used the parameter. All ranks make theirs in the same order. One thread.
//
//   optimizer.zero_grad();
//   torch::cross_entropy_loss(net(x), y).backward();
//   optimizer.step();
template <>
class DistributedOptimizer<torch::optim::Optimizer> {
 public:
  // `optimizer` must outlive this. `named_parameters`: names for messages. Throws InvalidArgument for options that are
  // out of range, and where ranks' parameters differ.
  explicit DistributedOptimizer(torch::optim::Optimizer& optimizer, const DistributedOptimizerOptions& options = {});
  DistributedOptimizer(torch::optim::Optimizer& optimizer, const DistributedOptimizerOptions& options,
                       const torch::OrderedDict<std::string, Tensor>& named_parameters);
  ~DistributedOptimizer();
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;

  // Reduces the gradients that were not reduced since the last step (after too few backwards, or none). `step` does
  // this first, so that all ranks make the same steps.
  void synchronize();

  // Makes the wrapped optimizer's step. Gradients are reduced over the ranks after each call of a closure.
  Tensor step(const std::function<Tensor()>& closure = {});
  void zero_grad(bool set_to_none = true);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

struct FitOptimizerOptions {
  Op op = Average;  // or Sum. Each rank counts by its examples: the average is over all ranks' examples.
  Compression compression = Compression::none;
};

// `inner` for Model::compile: fit's gradients are reduced over the ranks, each of which reads data of its own
// (Dataset::shard) and has its own logs and checkpoints. A rank whose data end earlier goes on without examples until
// all have ended; what one rank stops, or a signal ends, ends for all after the same step. All ranks make theirs in the
// same order, and fit together. Not for a strategy that has several workers itself.
template <>
class DistributedOptimizer<Optimizer> : public Optimizer {
 public:
  explicit DistributedOptimizer(const Optimizer& inner, const FitOptimizerOptions& options = {});
};

template <std::derived_from<Optimizer> T>
DistributedOptimizer(const T&, const FitOptimizerOptions& = {}) -> DistributedOptimizer<Optimizer>;
template <std::derived_from<torch::optim::Optimizer> T>
DistributedOptimizer(T&, const DistributedOptimizerOptions& = {}) -> DistributedOptimizer<torch::optim::Optimizer>;
template <std::derived_from<torch::optim::Optimizer> T>
DistributedOptimizer(T&, const DistributedOptimizerOptions&, const torch::OrderedDict<std::string, Tensor>&)
    -> DistributedOptimizer<torch::optim::Optimizer>;

}  // namespace lockstep::horovod
