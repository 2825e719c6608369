// Pipeline: a model cut into stages, each on a rank; microbatches of a batch go through them one after the other.
// Follows torch.distributed.pipelining.
//
//   lockstep::Pipeline pipeline({[] { return Front(); }, [] { return Back(); }}, mesh["pipeline"],
//                               {.schedule = lockstep::schedules::zero_bubble, .microbatches = 8});
//   torch::optim::AdamW adamw(pipeline.parameters());  // of this rank's stages
//
//   adamw.zero_grad();
//   const double loss = pipeline.step(
//       x, y, [](const Tensor& output, const Tensor& target) { return at::cross_entropy_loss(output, target); });
//   adamw.step();
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"
#include "lockstep/parallel/pipeline_schedule.h"
#include "lockstep/parallel/recompute.h"
#include "lockstep/strategy/pipeline_stage.h"

namespace lockstep {

// A parameter of a stage, by its name in the stage's module.
struct StageParameter {
  int stage = 0;
  std::string name;
};

struct PipelineOptions {
  // Called again after the third step with the costs that were measured over the mesh: stages stay where they are, and
  // the result is the same bit for bit.
  MakePipelineSchedule schedule = schedules::one_forward_one_backward;
  int microbatches = 4;

  // Keeps the inputs of stages for backward, and computes the rest again (recompute.h).
  bool recompute = false;

  // Parameters that are one in the unsplit model: they begin with the first one's values, and their gradients are
  // summed.
  std::vector<std::vector<StageParameter>> tied = {};
};

// The mean over the examples of a microbatch: a scalar.
using PipelineLoss = std::function<Tensor(const Tensor& output, const Tensor& target)>;

// The divisor of the sum of a batch's losses, from the whole batch's target, such as the number of labels that count.
using PipelineWeight = std::function<double(const Tensor& target)>;

// The scalar that is differentiated for a microbatch, from the last stage's output for `count` examples of the batch,
// from `first` on.
using MicrobatchLoss = std::function<Tensor(const Tensor& output, std::int64_t first, std::int64_t count)>;

// One thread a rank. All ranks make the same calls with the same arguments; what throws on one aborts the others. The
// calls throw what a Group, a stage and the loss throw.
//
// Batch normalization is over the examples of a microbatch. convert_sync_batchnorm(stage, mesh["data"].group())
// normalizes over a microbatch of all pipelines along "data". Their batches may have other numbers of examples, also
// none. All pipelines then compute as many microbatches as the one with most examples has, and steps are collective
// over the mesh. In backward a batch counts for its examples, or for its PipelineWeight: average the gradients by the
// same, as average_gradients(pipeline.parameters(), mesh["data"], examples) does. Throws InvalidArgument where the
// Group is not of the pipeline's mesh, and as SyncBatchNorm where all pipelines together have one value per channel.
class Pipeline {
 public:
  // Collective. Makes all stages, one after the other, and keeps this rank's. So initial values are those of the
  // unsplit model with the same seed. Throws InvalidArgument where the schedule does not fit the ranks and stages, for
  // less than one microbatch, and for tied parameters that are missing or differ in shape.
  Pipeline(std::vector<PipelineStage> stages, const Communicator& ranks, PipelineOptions options = {});
  ~Pipeline();

  // Forward and backward of a batch: adds the gradient of the mean loss over its examples to the gradients of this
  // rank's parameters, and returns that loss, on all ranks. x [examples, ...] is read by the first stage's rank and
  // target [examples, ...] by the last one's; on the others they are only counted. On every rank x must be on the
  // device of its stages: what other ranks send is copied there. Microbatches differ by one example at most, and there
  // are fewer of them where there are fewer examples. But where the stages' parameters are sharded, or have experts,
  // all microbatches are computed, some without examples, and x may have none. The third step is collective over the
  // whole mesh whose axis the ranks are. Throws InvalidArgument where gradients are off, and where the pipeline's ranks
  // give other numbers of examples. Throws it also where labels of int64 in `target` are -100, the ignore_index of
  // LibTorch's losses, unequally in the microbatches. The mean of a microbatch is then not over its examples. For such
  // a loss, and every other that is not a mean over examples, give a sum and a weight.
  double step(const Tensor& x, const Tensor& target, const PipelineLoss& loss);

  // A step for the loss that is `sum` over the batch, divided by `weight` of the batch's target. `sum` is called for
  // each microbatch and returns a scalar, `weight` once; both on the last stage's rank alone. Throws InvalidArgument
  // where gradients are off. For cross entropy with an ignore_index:
  //
  //   pipeline.step(x, y, [](const at::Tensor& output, const at::Tensor& y) {
  //     return torch::cross_entropy_loss(output, y, {}, at::Reduction::Sum, /*ignore_index=*/-100);
  //   }, [](const at::Tensor& y) { return y.ne(-100).sum().item<double>(); });
  double step(const Tensor& x, const Tensor& target, const PipelineLoss& sum, const PipelineWeight& weight);

  // Forward and backward of a batch whose loss is the sum of the losses of its microbatches, such as sums with weights:
  // adds the gradient of that sum. `loss` is called on the last stage's rank alone, for one microbatch after the other.
  // `most_microbatches` is below options.microbatches for pipelines with batches of different sizes whose parameters
  // are sharded over them: all must have as many. `weight`: the batch's weight in the mean of gradients over pipelines;
  // equal on this pipeline's ranks. Throws InvalidArgument where a stage has batch normalization over several ranks and
  // no weight is given.
  void forward_backward(const Tensor& x, const MicrobatchLoss& loss,
                        std::int64_t most_microbatches = std::numeric_limits<std::int64_t>::max(),
                        std::optional<double> weight = {});

  // The last stage's output for a batch, on all ranks, without gradients. Call eval() before it.
  Tensor forward(const Tensor& x, std::int64_t most_microbatches = std::numeric_limits<std::int64_t>::max());

  // After Communicator::regroup of the ranks, of which there must be as many as before, and a step that may have broken
  // off: goes on with them. Collective over them.
  void regroup();

  // Sets this rank's stages to training, or evaluation, as Module::train.
  void train(bool on = true) const;
  void eval() const { train(false); }

  // Return those of this rank's stages, in the order of stages.
  std::vector<Tensor> parameters() const;
  const std::vector<std::pair<int, std::shared_ptr<torch::nn::Module>>>& modules() const;  // by stage

  const PipelineSchedule& schedule() const;

  // When this rank carried out each action of its schedule in the last step, in seconds since the step began.
  const std::vector<PipelineTimes::Span>& last_times() const;

  // Collective. The last step for ui.perfetto.dev or chrome://tracing: a track for each rank, an event for each action
  // of its schedule. Ranks' clocks count from one barrier. Throws IoError on all ranks.
  void write_timeline(const std::string& path) const;

  // Collective, over the whole mesh whose axis the ranks are. Returns the cost of a microbatch at each stage in the
  // last step, in seconds: the mean over the mesh of medians. predict_times tells from it how long another schedule
  // would take. Where the schedule does not split backward, backward_input is all of backward.
  std::vector<PipelineCosts> measured_costs() const;

 private:
  void train_batch(const Tensor& x, const MicrobatchLoss& loss, std::int64_t most_microbatches,
                   const std::function<double()>& weight);

  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace lockstep
