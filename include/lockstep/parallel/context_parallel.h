// Context parallelism: each rank has a part of every sequence, for inputs that are too long for one device. Ring
// attention (Liu et al. 2023) is the only operator for which ranks exchange anything. Follows
// torch.distributed.tensor.experimental.context_parallel.
//
//   lockstep::parallelize_module(net, mesh["context"], {{"place.weight", lockstep::Shard{0}}});  // each its positions
//   const lockstep::ContextParallel context(mesh["context"]);
//   loss_function(net(context.part(x, 1)), context.part(y, 1)).backward();
//   lockstep::average_gradients(net->parameters(), mesh["context"]);
#pragma once

#include <optional>

#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"

namespace lockstep {

struct RingAttentionOptions {
  bool is_causal = false;
  std::optional<double> scale = {};  // empty: 1 / sqrt(features)
};

// torch::scaled_dot_product_attention over sequences of which each rank has an equal part, in the order of ranks.
// query, key and value are [..., positions / ranks, features]; so is the result, of the query's dtype. Sums of 16 bits
// are made in float32. Keys and values go round the ranks, so a rank has those of two parts at a time. Collective, in
// backward too; one thread a rank. Throws InvalidArgument where sizes do not fit, for a second derivative, and where
// ranks are in different calls. Ranks compare the shapes of keys and values, dtype, scale, `is_causal` and the purpose
// of `ranks`: give each layer Communicator::with_purpose.
Tensor ring_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Communicator& ranks,
                      const RingAttentionOptions& options = {});

// While one lives, torch::scaled_dot_product_attention is ring_attention in this thread, for modules that are not
// written for it. No other operator communicates: torch::nn::MultiheadAttention, convolutions and recurrent layers see
// this rank's positions alone. Calls with a mask, dropout or grouped queries throw InvalidArgument. The innermost
// object counts. Its attentions are numbered, and ranks compare the numbers too: backwards in another order are
// refused. Forwards of equal attentions in another order are not told apart. Where ranks may differ so, call each layer
// in a ContextParallel of its own, with `ranks.with_purpose(Purpose("block 1"))`.
class [[nodiscard]] ContextParallel {
 public:
  explicit ContextParallel(Communicator ranks);
  ~ContextParallel();
  ContextParallel(const ContextParallel&) = delete;
  ContextParallel& operator=(const ContextParallel&) = delete;

  // This rank's part of a tensor that all ranks have, along `dim`. Throws InvalidArgument where it cannot be divided.
  Tensor part(const Tensor& whole, std::int64_t dim) const;

  // Computes one such call; `attentions` counts them.
  Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const RingAttentionOptions& options);
  std::int64_t attentions() const { return attentions_; }

  // The innermost of this thread; null where there is none.
  static ContextParallel* current();
  const Communicator& ranks() const { return ranks_; }

 private:
  const Communicator ranks_;
  ContextParallel* const before_;
  std::int64_t attentions_ = 0;
};

}  // namespace lockstep
