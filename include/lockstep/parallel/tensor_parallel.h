// Tensor parallelism: each rank has a part of a layer's weights and does that part of the layer's work. Shoeybi et al.
// 2019; with sequence parallelism: Korthikanti et al. 2022. Follows torch.distributed.tensor.parallel.
//
//   lockstep::parallelize_module(*net, mesh["tensor"], {
//       {"token",        lockstep::RowwiseParallel()},                  // an embedding: each rank has some of the ids
//       {"blocks.*.qkv", lockstep::ColwiseParallel()},                  // each rank has some of the heads
//       {"blocks.*.out", lockstep::RowwiseParallel()},
//       {"blocks.*.up",  lockstep::ColwiseParallel()},
//       {"blocks.*.down", lockstep::RowwiseParallel()},
//       {"head",         lockstep::ColwiseParallel()},                  // with vocabulary_parallel_cross_entropy
//   });
//   torch::optim::AdamW adamw(net->parameters());                       // of this rank's parts
//
// The module's code stays as it is. It must take the sizes of what is divided from its tensors: the number of heads,
// say, as unflatten(-1, {-1, 3, head_size}) does.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"
#include "lockstep/strategy/module_factory.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

// How a tensor lies on the ranks: all have the whole, or each has an equal part along a dimension, where -1 is the
// last.
struct Replicate {};
struct Shard {
  std::int64_t dim = 0;
};
using Layout = std::variant<Replicate, Shard>;

// For linear layers and embeddings: each rank has some of the output's features. Input: whole, or divided along any
// dimension but the last (the sequence). Output: divided along the last dimension, or whole.
struct ColwiseParallel {
  Layout input = Replicate();
  Layout output = Shard{-1};

  // For a linear layer whose output is several parts one after the other, such as 3 for [queries, keys, values]: each
  // rank gets a part of each. 1 where the features are ordered by head.
  std::int64_t parts = 1;
};

// For linear layers: each rank has the weights of some of the input's features. Input: divided along the last
// dimension, or whole. Output: whole (the ranks' results are summed), or divided along any dimension but the last. For
// embeddings: each rank has the rows of some of the ids; the input is whole.
struct RowwiseParallel {
  Layout input = Shard{-1};
  Layout output = Replicate();

  // For an embedding whose weight is a head's as well: torch::linear(x, weight) gives this rank's part of the logits,
  // for vocabulary_parallel_cross_entropy. Off: it gives whole logits.
  bool divided_logits = false;
};

// For linear layers whose output all ranks have whole, and each uses for its part of other activations. Such are keys
// and values of multi-query attention, which the divided heads share. Each rank has all weights; gradients of the
// output are summed. Input: whole, or divided along any dimension but the last.
struct ReplicateParallel {
  Layout input = Replicate();
};

// For layers between those, such as normalization, whose input is divided along the sequence: each rank has all weights
// and uses them for its part. An embedding of positions takes its rank's part of the last dimension of ids.
struct SequenceParallel {};

// `Shard` as a style is for a parameter itself: each rank has its part along the dimension.
using ParallelStyle = std::variant<ColwiseParallel, RowwiseParallel, SequenceParallel, Shard, ReplicateParallel>;

// Styles by names of submodules, or of parameters for Shard. "*" stands for any characters but a dot; the empty name
// for the module itself.
using ParallelPlan = std::vector<std::pair<std::string, ParallelStyle>>;

// Gives all ranks rank 0's parameters and buffers, then keeps this rank's part of those that the plan divides, in the
// module's own tensors. Optimizers made afterwards have state for the parts alone. From then on torch::Linear,
// torch::linear and embedding communicate when they compute with these tensors. Parameters that tied layers share are
// divided once. A weight that two layers have by assignment, head->weight = embedding->weight, is found by the layer's
// name too.
//
// Other operators see the whole of a layer's divided parameter, as in one process: weight * mask, a norm for a penalty,
// einsum. The value is gathered for each call, with one warning, and all ranks must make the call. The gradient is this
// rank's part of the whole's. Elementwise operators act on the parts where they take the parameter alone, or, without
// gradients, tensors of the part's shape, as optimizers do. In-place operators take their part of operands that are
// whole. Operators that could mean the part or the whole throw InvalidArgument: slices along the divided dimension, and
// random numbers in place. size() is the part's. A parameter of the style Shard is the part for all operators but
// reductions.
//
// Where a parameter that all ranks have whole gets other gradients on other ranks, backward throws InvalidArgument.
// Only the first, second, fourth, eighth backward and so on compares the gradients.
//
// Collective, and so are forward and backward from then on: each rank computes the same operators in the same order,
// with the same inputs. A layer throws InvalidArgument where ranks give its whole input other values: its first,
// second, fourth, eighth call and so on compares. It throws it also for activations that are not of the shape that it
// needs.
//
// Throws InvalidArgument, on all ranks, where the ranks' modules or plans differ, and for a pattern that no name
// matches. Throws it also for a layer that a style is not made for, sizes that the number of ranks does not divide, and
// layouts that a style does not have.
void parallelize_module(torch::nn::Module& module, const Communicator& ranks, const ParallelPlan& plan);

template <class Holder>
requires internal::ModuleHolder<Holder>
void parallelize_module(const Holder& module, const Communicator& ranks, const ParallelPlan& plan) {
  parallelize_module(*internal::module_of(module), ranks, plan);
}

// The whole of a parameter that parallelize_module divided; another one as it is. Collective over its ranks; a new
// tensor, outside of autograd. Follows DTensor.full_tensor.
Tensor full_tensor(const Tensor& parameter);

// The negative logarithm of the softmax at the label, for each example. Each rank has the logits of its part of the
// classes, [..., classes / ranks]; labels are [...] of int64, the same on all ranks. The result [...] is the same on
// all. Labels that are `ignore_index` give 0. Collective. Follows torch.distributed.tensor.parallel's loss_parallel.
// Throws InvalidArgument for other shapes and dtypes, for a label that is no class, and for labels that differ. Throws
// it also for logits that are the same on all ranks: those are whole.
Tensor vocabulary_parallel_cross_entropy(const Tensor& logits, const Tensor& labels, const Communicator& ranks,
                                         std::int64_t ignore_index = -100);

}  // namespace lockstep
