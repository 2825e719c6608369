// The interpreter of pipeline schedules: carries out one rank's actions for one batch.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "lockstep/parallel/pipeline.h"
#include "parallel/split_linear.h"
#include "parallel/stage_links.h"

namespace lockstep::parallel {

// This rank's stages.
using StageForwards = std::map<int, std::function<Tensor(const Tensor&)>>;

class PipelineRun {
 public:
  // `alike`: computes microbatches without examples as well, since ranks of other pipelines, which may have more
  // examples, call the stages' modules together with these.
  PipelineRun(const PipelineSchedule& schedule, StageLinks& links, const StageForwards& forwards, int rank, bool alike);

  // Forward and backward. `times`: of each action, but for its wait for other ranks; an action on a microbatch without
  // examples takes none.
  void train(const Tensor& x, const MicrobatchLoss& loss, std::int64_t most_microbatches,
             std::vector<PipelineTimes::Span>& times);

  // The forwards alone. Returns the last stage's output where this rank has it, else nothing.
  Tensor predict(const Tensor& x, std::int64_t most_microbatches);

 private:
  using Key = std::pair<int, int>;  // stage and microbatch
  struct Kept {
    Tensor input, output;
    WeightGradients weights;
  };

  bool is_last(int stage) const { return stage + 1 == schedule_.stages(); }
  bool computes(int microbatch) const;
  void split(const Tensor& x, std::int64_t most_microbatches);
  Tensor take(const StageMessage& message, int from_stage);
  void give(const StageMessage& message, int to_stage, const Tensor& tensor);
  Tensor take_input(const PipelineAction& action);
  void forward(const PipelineAction& action, const Tensor& x);
  void backward(const PipelineAction& action, const Tensor& gradient);
  Tensor loss_of(const PipelineAction& action, const Tensor& output);

  const PipelineSchedule& schedule_;
  StageLinks& links_;
  const StageForwards& forwards_;
  const int rank_;
  const bool alike_;

  std::int64_t microbatches_ = 0;            // of this batch; later ones have no examples
  std::vector<Tensor> parts_;                // [microbatch]
  std::vector<std::int64_t> first_example_;  // [microbatch]
  const MicrobatchLoss* loss_ = nullptr;
  std::map<Key, Kept> kept_;
  std::map<StageMessage, Tensor> local_;  // between two stages of this rank
};

}  // namespace lockstep::parallel
