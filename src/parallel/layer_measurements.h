// How long layers take as a split divides them, and how much memory.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/ops/memory.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/plan.h"
#include "parallel/choose_split.h"
#include "parallel/measure_links.h"
#include "parallel/split_linear.h"

namespace lockstep::parallel {

// Finds the layers of a model that cost the same, so that one of each kind is measured.
struct MeasureInput {
  const std::vector<PipelineStage>& layers;  // each of which names its modules by its number in the model
  const Tensor& x;
  const Tensor& target;
  const SplitLoss& loss;
  const PlanOptions& options;
  std::int64_t fewest_examples = 1;  // of a microbatch

  bool is_last(std::size_t layer) const { return layer + 1 == layers.size(); }
};

struct LayerKind {
  std::size_t layer = 0;      // the first of this kind
  ParallelPlan entries = {};  // of the tensor plan
  Tensor sample;              // its input for the fewest examples
  std::string identity = {};  // layers with the same one cost the same
  double parameter_bytes = 0;
  double trained_bytes = 0;  // of those that are not frozen

  // The layer's input for `examples`: of the batch for the first layer, else the sample repeated.
  Tensor input(const MeasureInput& of, std::int64_t examples) const;
};

struct LayerKinds {
  std::vector<std::size_t> of_layers;  // [layer]: which kind
  std::vector<LayerKind> kinds;
  std::string refused;  // why the layers cannot be divided so

  double parameter_bytes() const;  // of all layers
};

// Finds the kinds of layers divided over `tensor` ranks. Makes one layer after the other, and passes the fewest
// examples through. Not collective. Throws InvalidArgument for an entry of the tensor plan that matches nothing and for
// a layer whose output is not floating-point; on one rank also what a layer throws.
LayerKinds find_kinds(const MeasureInput& input, int tensor);

// One layer of a model, made for a division, and run as a stage of a Pipeline runs it.
class LayerTrial {
 public:
  // Collective over the ranks: `tensor` are those of parallelize_module, `data` those of sharding. `input` and `kind`
  // must outlive it.
  LayerTrial(const MeasureInput& input, const LayerKind& kind, Sharding sharding, const Communicator& tensor,
             const Communicator& data);

  // Computes forward, and the loss of the last layer, and keeps the graph for backward. `x`: input(examples).
  Tensor input(std::int64_t examples) const { return kind_.input(input_, examples); }
  void forward(const Tensor& x, std::int64_t examples);

  // Gives up what fully_shard of stage 3 has given up before backward.
  void reshard();

  // backward_weight does what backward_input left; with sharding nothing.
  void backward_input();
  void backward_weight();

  void zero_grad() const;

  const Tensor& output() const { return output_; }  // of the layer, not of the loss
  const std::vector<Tensor>& parameters() const { return parameters_; }

 private:
  const MeasureInput& input_;
  const LayerKind& kind_;
  const Sharding sharding_;
  const Communicator tensor_;
  std::shared_ptr<torch::nn::Module> module_;
  std::optional<FullyShardedParameters> sharded_;
  std::vector<Tensor> parameters_;  // as optimizers get them
  Tensor output_, last_;
  const std::shared_ptr<WeightGradients> weights_ = std::make_shared<WeightGradients>();
};

// Every call is collective over the ranks that measure.
class LayerMeasurements {
 public:
  LayerMeasurements(const MeasureInput& input, MeasuredLinks& links) : input_(input), links_(links) {}

  // Finds the kinds of layers, and counts memory for the examples of microbatches. Divisions without sharding first.
  void count(const LayerDivision& division, const std::set<std::int64_t>& examples);

  // Then measures times; again, where what disturbed one call shall not decide: the lesser ones count. All ranks
  // compute at once, as in training. Where there are no Groups of as many ranks as the division has, each rank
  // rehearses it alone, and what it would have communicated is added.
  void time(const LayerDivision& division);

  DividedLayers result(const LayerDivision& division) const;

 private:
  struct Measured {
    std::vector<LayerProfile> profiles;  // [kind]
    std::set<std::int64_t> examples;
    bool is_computed = false;
  };

  LayerKinds find(int tensor) const;
  void count_bytes(const LayerKinds& kinds, int tensor, Measured& measured) const;
  void time_kind(const LayerDivision& division, std::size_t kind, Measured& measured,
                 const std::function<double()>& communicated, const Communicator& tensor,
                 const Communicator& data) const;
  std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::vector<Tensor>& parameters) const;

  const MeasureInput& input_;
  MeasuredLinks& links_;
  std::map<int, LayerKinds> kinds_;  // by ranks of the tensor axis
  std::map<LayerDivision, Measured> measured_;
};

// Counted by Lockstep's allocator; 0 where LibTorch's own serves.
inline double bytes_in_use() {
  const auto stats = memory_stats();
  return static_cast<double>(stats.reserved_bytes) - static_cast<double>(stats.cached_bytes);
}

}  // namespace lockstep::parallel
