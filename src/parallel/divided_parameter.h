// The hooks of parameters of which each rank of tensor parallelism has a part.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "gradient/parameter_parts.h"
#include "gradient/tensor_map.h"
#include "lockstep/parallel/tensor_parallel.h"
#include "ops/parameter_hook.h"
#include "parallel/equal_gradients.h"
#include "parallel/split_linear.h"

namespace lockstep::parallel {

// Where the parts of a parameter lie: along `dim`, once for each of its blocks. Follows DTensor's Shard.
struct Division {
  std::int64_t dim = 0;
  std::int64_t blocks = 1;  // equal ones along `dim`, each of which is divided: 3 for [queries, keys, values]
};

// This rank's part, in memory of its own.
Tensor divided(const Tensor& whole, const Division& division, const Communicator& ranks);

// The hook of a parameter of which each rank has another part, or another one in its place, as experts are.
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

// The module, the parameter and the reason of a division, for messages.
struct DividedFor {
  std::string layer;      // the module's name
  std::string parameter;  // such as "blocks.0.up.weight"
  std::string style;      // such as "ColwiseParallel"
};

// How operators see a value of which each rank has a part.
enum class OtherOperators {
  on_whole,  // as one process does: the value is the whole one
  on_part,   // the module is written for parts; what reduces the divided dimension is of the whole
};

// The hook of a divided parameter. The module's operators take the part of a parameter of the style Shard. Other
// operators than a layer's own take the whole of a layer's parameter. Threads may share a hook.
class DividedParameter : public PartialParameter {
 public:
  // `whole`: the parameter, before it is divided.
  DividedParameter(DividedFor what, Division division, const Tensor& whole, Communicator ranks,
                   OtherOperators see = OtherOperators::on_whole);

  const Division& division() const { return division_; }
  const std::string& layer() const { return what_.layer; }
  const std::string& name() const { return what_.parameter; }
  const std::string& style() const { return what_.style; }

  void before(const ops::OperatorCall& call, std::size_t i) override;
  bool otherwise(const ops::OperatorCall& call, const ops::ArgumentPlace& place) override;

  bool make_up_a_whole() const override { return true; }
  std::vector<std::int64_t> whole_sizes(at::IntArrayRef part) const override;
  Tensor whole(const Tensor& part) const override;
  Tensor part_of(const Tensor& whole) const override { return divided(whole, division_, ranks()); }

  // The dimension of a view of the part, or of a copy, along which the ranks have others. None where the view does not
  // have it as one dimension, or does not tell it from another.
  std::optional<std::int64_t> divided_dim(const Tensor& view) const;

  // The first function returns the whole of a view, in autograd, for work that all ranks make alike. The second one
  // returns this rank's part of a tensor that is divided like the parameter, along `dim`.
  Tensor whole_for_all(const Tensor& view, std::int64_t dim) const;
  Tensor part_along(const Tensor& whole, std::int64_t dim) const;

  // Warns once for each operator.
  void warn_of_gathering(const std::string& op) const;

 private:
  const DividedFor what_;
  const Division division_;
  const OtherOperators see_;
  const std::vector<std::int64_t> sizes_;  // of the part
  mutable Mutex mutex_;
  mutable std::set<std::string> warned_ LOCKSTEP_GUARDED_BY(mutex_);  // names of operators
};

// The hook of a parameter that is divided, or partial; null for any other.
std::shared_ptr<const DividedParameter> division_of(const Tensor& parameter);
std::shared_ptr<const PartialParameter> partial_of(const Tensor& parameter);

// The hook of the weight of a linear layer [outputs, inputs], or of an embedding [ids, features]: makes the layer's
// product, or looks up rows, with the part, and communicates. Where no style of the other kind shares the weight, the
// hook computes that kind of layer too. That is an embedding with a linear layer's weight, or a linear layer to logits
// with an embedding's, a tied head. `Style`: ColwiseParallel or RowwiseParallel.
template <class Style>
class DividedWeight final : public DividedParameter {
 public:
  DividedWeight(DividedFor what, const Tensor& weight, const Style& style, bool is_embedding,
                const Communicator& ranks);
  bool run(const ops::OperatorCall& call, std::size_t i) override;
  bool otherwise(const ops::OperatorCall& call, const ops::ArgumentPlace& place) override;

 private:
  const gradient::WeakTensor weight_;
  const Style style_;
  const bool is_embedding_;

  // The inputs of its uses as a linear layer, and as an embedding.
  const WholeInputs inputs_{layer(), ranks()}, ids_{layer(), ranks()};
};

// The hook of a column-parallel layer's bias, which is used whole where it is added to whole outputs. torch::nn::Linear
// adds the bias by a separate operator where the input has more than two dimensions.
class DividedBias final : public DividedParameter {
 public:
  DividedBias(DividedFor what, const Tensor& bias, const ColwiseParallel& style, const Communicator& ranks);
  void before(const ops::OperatorCall& call, std::size_t i) override;
  bool otherwise(const ops::OperatorCall& call, const ops::ArgumentPlace& place) override;

 private:
  bool is_added_to_whole(const ops::OperatorCall& call, std::size_t i) const;
  const bool output_is_whole_;
};

// The hook of the weight of a linear layer that all ranks compute whole, and each uses for its part. Gradients of the
// output are summed.
class SharedLinear final : public ops::ParameterHook {
 public:
  SharedLinear(std::string layer, const Tensor& weight, const ReplicateParallel& style, Communicator ranks);
  bool run(const ops::OperatorCall& call, std::size_t i) override;

 private:
  const std::string layer_;
  const gradient::WeakTensor weight_;
  const ReplicateParallel style_;
  const Communicator ranks_;
  const WholeInputs inputs_;
  const PartialGradients gradients_;
};

// The hook of a parameter that all ranks have, and each uses for its part of the sequence: gradients are summed.
class SequencePart final : public ops::ParameterHook {
 public:
  // `name`: the parameter's. `of`: its layer's style.
  enum class Of { sequence_parallel, replicate_parallel, rowwise_parallel };
  SequencePart(const std::string& name, Communicator ranks, Of of = Of::sequence_parallel);
  const Communicator& ranks() const { return ranks_; }
  void before(const ops::OperatorCall& call, std::size_t i) override;
  bool otherwise(const ops::OperatorCall& call, const ops::ArgumentPlace& place) override;

 private:
  const Communicator ranks_;
  const Of of_;
  const PartialGradients gradients_;
};

// True where parallelize_module, or MoE, has given the parameter a style.
bool has_style(const Tensor& parameter);

// Prepares the call's argument at `place`: the parameter, or a view or a copy of it. Returns whether it has carried out
// the operator. Collective where it gathers. Throws InvalidArgument for operators that it refuses.
bool run_other_operator(const DividedParameter& parameter, OtherOperators see, const ops::OperatorCall& call,
                        const ops::ArgumentPlace& place);

// True where the operator takes this tensor and no other but numbers, and is pointwise, a copy, or a sum or norm of all
// elements.
bool is_of_it_alone(const ops::OperatorCall& call, const ops::ArgumentPlace& place);

// Carries out an operator of it alone that is pointwise or a copy, and returns true: the result goes through hooks as
// the argument does. Returns false for other operators.
bool keeps_hooks(const ops::OperatorCall& call, const ops::ArgumentPlace& place);

// True where another operand is as large as this rank's part along the divided dimension, the last one of both.
bool is_part_of_outputs(const ops::OperatorCall& call, const Tensor& part);

}  // namespace lockstep::parallel
