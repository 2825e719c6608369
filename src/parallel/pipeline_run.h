// A step of a pipeline: the interpreter of schedules, which carries out one rank's actions for one batch, and what the
// step agrees on and checks before.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "gradient/layer_over_ranks.h"
#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"
#include "lockstep/parallel/pipeline.h"
#include "parallel/split_linear.h"
#include "parallel/stage_links.h"

namespace lockstep::parallel {

// This rank's stages.
using StageForwards = std::map<int, std::function<Tensor(const Tensor&)>>;

// The times of a step's actions. A GPU measures them by its events, so that the host waits for it only when it is
// asked.
class ActionTimes {
 public:
  // Begins a step on the device.
  void begin_step(at::Device device);

  // To be called where each action begins, and where it ends.
  void mark();

  // Returns the times of the last step's actions, from its begin. Waits for the GPU. Throws DeadlineExceeded.
  const std::vector<PipelineTimes::Span>& spans(Deadline deadline);

 private:
  double seconds(std::size_t mark) const;

  at::Device device_ = at::kCPU;
  std::vector<Deadline::Clock::time_point> of_host_;  // the step's begin, and the marks
  std::vector<c10::Event> of_gpu_;
  std::vector<PipelineTimes::Span> spans_;
};

class PipelineRun {
 public:
  // `alike`: computes microbatches without examples as well, since ranks of other pipelines, which may have more
  // examples, call the stages' modules together with these.
  PipelineRun(const PipelineSchedule& schedule, StageLinks& links, const StageForwards& forwards, int rank, bool alike);

  // Forward and backward. `times`: of each action, but for its wait for other ranks; an action on a microbatch without
  // examples takes none.
  void train(const Tensor& x, const MicrobatchLoss& loss, std::int64_t most_microbatches, ActionTimes& times);

  // The forwards alone. Returns the last stage's output where this rank has it, else nothing.
  Tensor predict(const Tensor& x, std::int64_t most_microbatches);

 private:
  using Key = std::pair<int, int>;  // stage and microbatch
  struct Kept {
    Tensor input, output;
    std::shared_ptr<WeightGradients> weights;  // that backward_input has left; null before
  };

  bool is_last(int stage) const { return stage + 1 == schedule_.stages(); }
  bool computes(int microbatch) const;
  void split(const Tensor& x, std::int64_t most_microbatches);
  Tensor take(const StageMessage& message, int from_stage);
  void give(const StageMessage& message, int to_stage, const Tensor& tensor);
  Tensor take_input(const PipelineAction& action);
  Tensor take_for(const PipelineAction& action);
  void carry_out(const PipelineAction& action, const Tensor& taken);
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

// Pipelines call such a layer together: each for as many microbatches as the one with most examples has. While this
// object lives, the layers' backwards have the weight of the whole batch.
class StepOverRanks {
 public:
  using Layers = std::vector<std::shared_ptr<gradient::LayerOverRanks>>;

  // `layers`: of this rank's stages; may be none where other ranks of the pipeline have some. Collective over the mesh
  // whose axis `pipeline` is. Throws InvalidArgument where a layer's ranks are not of that mesh.
  StepOverRanks(Layers layers, const Communicator& pipeline, std::int64_t examples);
  ~StepOverRanks();
  StepOverRanks(const StepOverRanks&) = delete;
  StepOverRanks& operator=(const StepOverRanks&) = delete;

  // The examples of the pipeline that has most.
  std::int64_t most_examples() const { return most_examples_; }

  // Collective over the pipeline. `weight` is called on its rank `last` alone, and not without examples.
  void set_weight(const std::function<double()>& weight, int last);

 private:
  const Layers layers_;
  const Communicator pipeline_;
  const std::int64_t examples_;
  std::int64_t most_examples_ = 0;
};

// Throws InvalidArgument where means over the labels of `parts` of a batch do not make up the batch's mean. They do
// where each part has its share of the labels that are not -100, LibTorch's ignore_index. Only labels of int64 are
// examined.
void check_labels_count_alike(const char* caller, const Tensor& target, std::int64_t parts);

// The first line of what an exception says: LibTorch's go on with their stacks.
inline std::string first_line(const std::exception& error) {
  const std::string all = error.what();
  return all.substr(0, all.find('\n'));
}

// Waits until the device has computed all work that it was given; a CPU has already.
inline void synchronize(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

}  // namespace lockstep::parallel
