// One layer of a model, made for a division, and run as a stage of a Pipeline runs it.
#pragma once

#include <memory>
#include <optional>

#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/plan.h"
#include "parallel/choose_split.h"

namespace lockstep::parallel {

struct TrialGroups {
  Communicator tensor;
  Communicator data;  // of sharding
};

class LayerTrial {
 public:
  // Collective over the groups. `stage`: makes the layer, called by its number; `entries` are those for it.
  LayerTrial(const PipelineStage& stage, const ParallelPlan& entries, Sharding sharding, const TrialGroups& groups);
  ~LayerTrial();

  // Computes forward, and the loss where it is given, and keeps the graph for `backward`.
  void forward(const Tensor& x);
  void forward(const Tensor& x, const Tensor& target, const SplitLoss& loss);

  // Gives up what fully_shard of stage 3 has given up before backward.
  void reshard();

  // backward_weight does what backward_input left; with sharding nothing.
  void backward_input();
  void backward_weight();

  void zero_grad() const;

  const Tensor& output() const { return output_; }  // of the layer, not of the loss
  const std::vector<Tensor>& parameters() const { return parameters_; }

 private:
  struct Backward;

  const PipelineStage stage_;
  const Sharding sharding_;
  const Communicator tensor_;
  std::shared_ptr<torch::nn::Module> module_;
  std::optional<FullyShardedParameters> sharded_;
  std::vector<Tensor> parameters_;  // as optimizers get them
  Tensor output_, last_;
  std::unique_ptr<Backward> backward_;
};

}  // namespace lockstep::parallel
