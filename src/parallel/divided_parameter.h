// The hooks of parameters of which each rank of tensor parallelism has a part.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "gradient/parameter_parts.h"
#include "lockstep/parallel/tensor_parallel.h"
#include "ops/parameter_hook.h"
#include "parallel/linear_call.h"

namespace lockstep::parallel {

// Where the parts of a parameter lie: along `dim`, once for each of its blocks. Follows DTensor's Shard.
struct Division {
  std::int64_t dim = 0;
  std::int64_t blocks = 1;  // equal ones along `dim`, each of which is divided: 3 for [queries, keys, values]
};

// This rank's part, in memory of its own.
Tensor divided(const Tensor& whole, const Division& division, const Communicator& ranks);

// Of a parameter of which the ranks have other parts, or of which they have others in its place, such as other experts.
class PartialParameter : public ops::ParameterHook, public gradient::ParameterParts {
 public:
  explicit PartialParameter(Communicator ranks) : ranks_(std::move(ranks)) {}
  const Communicator& ranks() const { return ranks_; }

  std::vector<Communicator> holders() const override { return {ranks_}; }
  bool make_up_a_whole() const override { return false; }
  std::vector<std::int64_t> whole_sizes(at::IntArrayRef part) const override { return part.vec(); }
  Tensor whole(const Tensor& part) const override { return part; }
  Tensor part_of(const Tensor& whole) const override { return whole; }

 private:
  const Communicator ranks_;
};

class DividedParameter : public PartialParameter {
 public:
  DividedParameter(std::string layer, Division division, Communicator ranks)
      : PartialParameter(std::move(ranks)), layer_(std::move(layer)), division_(division) {}

  const Division& division() const { return division_; }

  void before(const ops::OperatorCall& call, std::size_t i) override;

  bool make_up_a_whole() const override { return true; }
  std::vector<std::int64_t> whole_sizes(at::IntArrayRef part) const override;
  Tensor whole(const Tensor& part) const override;
  Tensor part_of(const Tensor& whole) const override { return divided(whole, division_, ranks()); }

 protected:
  // The whole, in autograd, for work that all ranks make alike.
  Tensor whole_for_all(const Tensor& part) const;

  const std::string& layer() const { return layer_; }  // its name, for messages

 private:
  const std::string layer_;
  const Division division_;
};

// The hook of a parameter that is divided, or partial; null for any other.
std::shared_ptr<const DividedParameter> division_of(const Tensor& parameter);
std::shared_ptr<const PartialParameter> partial_of(const Tensor& parameter);

// Of a linear layer's weight [outputs, inputs]: makes the layer's product with the part, and communicates. `Style`:
// ColwiseParallel or RowwiseParallel.
template <class Style>
class DividedLinear final : public DividedParameter {
 public:
  DividedLinear(std::string layer, const Tensor& weight, const Style& style, const Communicator& ranks);
  bool run(const ops::OperatorCall& call, std::size_t i) override;

 private:
  const WeakParameter weight_;
  const Style style_;
};

// Of a column-parallel layer's bias: the whole, where it is added to whole outputs. torch::nn::Linear adds it by an
// operator of its own where its input has more than two dimensions.
class DividedBias final : public DividedParameter {
 public:
  DividedBias(std::string layer, const ColwiseParallel& style, const Communicator& ranks);
  void before(const ops::OperatorCall& call, std::size_t i) override;

 private:
  bool is_added_to_whole(const ops::OperatorCall& call, std::size_t i) const;
  const bool output_is_whole_;
};

// Of an embedding's weight [ids, features].
template <class Style>
class DividedEmbedding final : public DividedParameter {
 public:
  DividedEmbedding(std::string layer, const Style& style, const Communicator& ranks);
  bool run(const ops::OperatorCall& call, std::size_t i) override;

 private:
  const Style style_;
};

// Of a parameter that all ranks have, each of which uses it for its part of the sequence: its gradient is their sum.
class SequencePart final : public ops::ParameterHook {
 public:
  explicit SequencePart(Communicator ranks) : ranks_(std::move(ranks)) {}
  const Communicator& ranks() const { return ranks_; }
  void before(const ops::OperatorCall& call, std::size_t i) override;

 private:
  const Communicator ranks_;
};

// Whether parallelize_module, or MoE, has given the parameter a style.
bool has_style(const Tensor& parameter);

}  // namespace lockstep::parallel
