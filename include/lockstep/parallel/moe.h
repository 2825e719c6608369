// Mixture of experts: a layer that sends each token to a few of many experts, which lie on the ranks of an axis.
// Follows Shazeer et al. 2017, GShard (Lepikhin et al. 2021) and Switch Transformers (Fedus et al. 2022).
//
//   lockstep::MoE moe({.experts = 8, .top_k = 2}, width, [=] { return FeedForward(width); }, mesh["expert"]);
//   const auto y = moe(x);                                // [..., width]
//   (loss(y) + 0.01 * moe->balance_loss()).backward();
//   lockstep::average_gradients(net->parameters(), mesh["expert"]);
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"
#include "lockstep/strategy/module_factory.h"

namespace lockstep {

struct MoEOptions {
  std::int64_t experts = 8;  // on all ranks together; a multiple of the number of ranks
  std::int64_t top_k = 2;    // experts of a token

  // An expert takes at most capacity_factor * top_k * tokens / experts of the tokens of all ranks. It adds nothing to
  // the tokens after those: they are dropped. The order is that of ranks and tokens, first choices before second ones.
  // 0: no bound.
  double capacity_factor = 0;
};

// The gate is on all ranks, an expert on one. The result does not depend on the number of ranks: it is that of one
// process with all experts and all ranks' tokens. Collective: all ranks make their layers in one order, and call
// forward and backward alike. Both throw InvalidArgument where ranks are in different layers. One thread a rank.
class MoEImpl : public torch::nn::Module {
 public:
  // `make_expert` returns a module holder, or a shared_ptr to a module, with `Tensor forward(Tensor)`, [tokens, width]
  // to the same. It is called for all experts, so that initial values are those of one process with the same seed; this
  // rank's are kept, as "expert<number>". Throws InvalidArgument where the number of experts is not a multiple of the
  // number of ranks, and for a top_k that is not between 1 and the number of experts.
  template <class Factory>
  MoEImpl(MoEOptions options, std::int64_t width, const Factory& make_expert, Communicator ranks = {})
      : MoEImpl(options, width, internal::maker(make_expert), internal::forward_of<Factory>(), std::move(ranks)) {}

  // x: [..., width], as many tokens as there are; ranks may have different numbers. Tokens are weighted by the softmax
  // of their gate, over their top_k experts.
  Tensor forward(const Tensor& x);

  // A scalar of the last forward, over all ranks' tokens: experts times the sum over experts of (share of tokens whose
  // first choice it is) times (mean probability). It is 1 where tokens are spread evenly. Each rank has its part of the
  // scalar, so the mean of the ranks' gradients is that of the whole. Switch Transformers, equation 4. recompute keeps
  // no graph of the scalar. So after a forward of recompute this throws InvalidArgument where gradients are on.
  Tensor balance_loss() const;

  // Return how many tokens each expert took, and how many choices were dropped, in the last forward over all ranks.
  const std::vector<std::int64_t>& tokens_of_experts() const { return tokens_of_experts_; }
  std::int64_t dropped() const { return dropped_; }

 private:
  MoEImpl(MoEOptions options, std::int64_t width, const internal::MakeModule& make, internal::ForwardOfModule forward,
          Communicator ranks);

  const MoEOptions options_;
  const Communicator ranks_;
  const internal::ForwardOfModule expert_forward_;
  Tensor gate_;                                              // [experts, width]
  std::vector<std::shared_ptr<torch::nn::Module>> experts_;  // this rank's
  Tensor balance_loss_;
  bool is_recomputed_ = false;  // the last forward
  std::vector<std::int64_t> tokens_of_experts_;
  std::int64_t dropped_ = 0;
};

class MoE : public torch::nn::ModuleHolder<MoEImpl> {
 public:
  template <class Factory>
  MoE(MoEOptions options, std::int64_t width, const Factory& make_expert, Communicator ranks = {})
      : torch::nn::ModuleHolder<MoEImpl>(std::make_shared<MoEImpl>(options, width, make_expert, std::move(ranks))) {}
  MoE(std::shared_ptr<MoEImpl> module)  // NOLINT: as every holder, for register_module
      : torch::nn::ModuleHolder<MoEImpl>(std::move(module)) {}
  MoE(std::nullptr_t) : torch::nn::ModuleHolder<MoEImpl>(nullptr) {}  // NOLINT: as every holder
};

}  // namespace lockstep
