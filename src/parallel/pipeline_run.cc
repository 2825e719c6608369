#include "parallel/pipeline_run.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <span>
#include <utility>

#include "base/text.h"
#include "collective/gpus/cuda.h"
#include "lockstep/base/error.h"
#include "parallel/mesh_backend.h"

namespace lockstep::parallel {

namespace {

using Kind = PipelineAction::Kind;
using Message = StageMessage::Kind;

StageMessage message(Message kind, const PipelineAction& action) { return {kind, action.stage, action.microbatch}; }

}  // namespace

void ActionTimes::begin_step(at::Device device) {
  device_ = device;
  of_host_.clear();
  of_gpu_.clear();
  spans_.clear();
  mark();
}

void ActionTimes::mark() {
  if (device_.is_cuda()) {
    of_gpu_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    of_gpu_.back().record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  } else {
    synchronize(device_);
    of_host_.push_back(Deadline::Clock::now());
  }
}

double ActionTimes::seconds(std::size_t mark) const {
  constexpr double kMilliseconds = 1e-3;
  if (device_.is_cuda()) return of_gpu_[0].elapsedTime(of_gpu_[mark]) * kMilliseconds;
  return std::chrono::duration<double>(of_host_[mark] - of_host_[0]).count();
}

const std::vector<PipelineTimes::Span>& ActionTimes::spans(Deadline deadline) {
  const auto is_done = [&] { return of_gpu_.empty() || of_gpu_.back().query(); };
  if (!collective::gpus::wait_until(is_done, deadline))
    throw DeadlineExceeded("a GPU's step of a pipeline, for its times", deadline.waited());
  const auto marks = std::max(of_host_.size(), of_gpu_.size());
  for (auto begin = 2 * spans_.size() + 1; begin + 1 < marks; begin += 2)
    spans_.push_back({seconds(begin), seconds(begin + 1)});
  return spans_;
}

PipelineRun::PipelineRun(const PipelineSchedule& schedule, StageLinks& links, const StageForwards& forwards, int rank,
                         bool alike)
    : schedule_(schedule), links_(links), forwards_(forwards), rank_(rank), alike_(alike) {}

bool PipelineRun::computes(int microbatch) const {
  return alike_ ? microbatch < microbatches_ : parts_[static_cast<std::size_t>(microbatch)].size(0) > 0;
}

void PipelineRun::split(const Tensor& x, std::int64_t most_microbatches) {
  const bool may_be_empty = alike_ || most_microbatches == 0;  // then others compute in it
  if (!x.defined() || x.dim() == 0 || (x.size(0) == 0 && !may_be_empty))
    throw InvalidArgument("Pipeline: x has no examples; its first dimension counts them");
  microbatches_ = std::clamp<std::int64_t>(most_microbatches, 1, schedule_.microbatches);
  parts_ = x.tensor_split(microbatches_);
  parts_.resize(static_cast<std::size_t>(schedule_.microbatches), x.narrow(0, 0, 0));
  std::int64_t first = 0;
  for (const auto& part : parts_) first_example_.push_back(std::exchange(first, first + part.size(0)));
}

// Takes the tensor of another stage, of this rank or another one.
Tensor PipelineRun::take(const StageMessage& wanted, int from_stage) {
  const auto from = schedule_.rank_of_stage[static_cast<std::size_t>(from_stage)];
  if (from != rank_) return links_.receive(from, wanted).to(parts_[0].device());
  return std::move(local_.extract(wanted).mapped());
}

void PipelineRun::give(const StageMessage& what, int to_stage, const Tensor& tensor) {
  const auto to = schedule_.rank_of_stage[static_cast<std::size_t>(to_stage)];
  if (to != rank_) {
    links_.send(to, what, tensor);
  } else {
    local_.emplace(what, tensor);
  }
}

Tensor PipelineRun::take_input(const PipelineAction& action) {
  if (action.stage == 0) return parts_[static_cast<std::size_t>(action.microbatch)];
  return take({Message::output, action.stage - 1, action.microbatch}, action.stage - 1);
}

Tensor PipelineRun::loss_of(const PipelineAction& action, const Tensor& output) {
  const auto i = static_cast<std::size_t>(action.microbatch);
  if (parts_[i].size(0) == 0) return output.sum() * 0;
  const auto loss = (*loss_)(output, first_example_[i], parts_[i].size(0));
  if (loss.numel() == 1) return loss;
  throw InvalidArgument(text("Pipeline: the loss has shape ", loss.sizes(), "; that of a microbatch must be a scalar"));
}

void PipelineRun::forward(const PipelineAction& action, const Tensor& x) {
  const bool has_gradient = action.stage > 0 && x.is_floating_point();
  const auto input = has_gradient ? x.detach().requires_grad_() : x;
  auto output = forwards_.at(action.stage)(input);
  if (is_last(action.stage)) {
    output = loss_of(action, output);
  } else if (!output.is_floating_point()) {
    throw InvalidArgument(text("Pipeline: the output of stage ", action.stage, " is of ", output.scalar_type(),
                               "; it must be floating-point, or no gradient could come back"));
  } else {
    give(message(Message::output, action), action.stage + 1, output.detach());
  }
  kept_[{action.stage, action.microbatch}] = {input, output, {}};
}

void PipelineRun::backward(const PipelineAction& action, const Tensor& gradient) {
  auto kept = kept_.extract({action.stage, action.microbatch});
  auto& [input, output, weights] = kept.mapped();
  if (action.kind == Kind::backward_input) weights = std::make_shared<WeightGradients>();
  if (output.requires_grad()) {
    const auto leaving = leave_weights_to(weights);
    torch::autograd::backward({output}, {gradient});
  }
  if (action.stage > 0 && input.is_floating_point()) {
    auto of_input = input.grad().defined() ? input.grad() : at::zeros_like(input);
    give(message(Message::gradient, action), action.stage - 1, of_input);
  }
  input = output = Tensor();
  if (action.kind == Kind::backward_input) kept_.insert(std::move(kept));
}

// Takes what other stages give to the action.
Tensor PipelineRun::take_for(const PipelineAction& action) {
  if (action.kind == Kind::forward) return take_input(action);
  if (action.kind == Kind::backward_weight || is_last(action.stage)) return {};
  return take({Message::gradient, action.stage + 1, action.microbatch}, action.stage + 1);
}

void PipelineRun::carry_out(const PipelineAction& action, const Tensor& taken) {
  switch (action.kind) {
    case Kind::forward: return forward(action, taken);
    case Kind::backward_weight: return kept_.extract({action.stage, action.microbatch}).mapped().weights->compute();
    case Kind::backward:
    case Kind::backward_input: return backward(action, taken);
  }
}

void PipelineRun::train(const Tensor& x, const MicrobatchLoss& loss, std::int64_t most_microbatches,
                        ActionTimes& times) {
  split(x, most_microbatches);
  loss_ = &loss;
  times.begin_step(x.device());
  for (const auto& action : schedule_.actions[static_cast<std::size_t>(rank_)]) {
    const auto taken = computes(action.microbatch) ? take_for(action) : Tensor();
    times.mark();
    if (computes(action.microbatch)) carry_out(action, taken);
    times.mark();
  }
  links_.flush();
}

Tensor PipelineRun::predict(const Tensor& x, std::int64_t most_microbatches) {
  const at::NoGradGuard no_gradient;
  split(x, most_microbatches);
  std::vector<Tensor> outputs;
  for (const auto& action : schedule_.actions[static_cast<std::size_t>(rank_)]) {
    if (action.kind != Kind::forward || !computes(action.microbatch)) continue;
    const auto output = forwards_.at(action.stage)(take_input(action));
    if (is_last(action.stage)) {
      outputs.push_back(output);
    } else {
      give(message(Message::output, action), action.stage + 1, output);
    }
  }
  links_.flush();
  return outputs.empty() ? Tensor() : at::cat(outputs);
}

namespace {

const Purpose kExamples("the examples of pipelines that call layers together"),
    kWeight("what a pipeline's batch counts for");

}  // namespace

StepOverRanks::StepOverRanks(Layers layers, const Communicator& pipeline, std::int64_t examples)
    : layers_(std::move(layers)),
      pipeline_(pipeline.with_purpose(kWeight)),
      examples_(examples),
      most_examples_(examples) {
  for (const auto& layer : layers_) {
    if (are_of_one_mesh(layer->group(), pipeline.group())) continue;
    throw InvalidArgument(text("Pipeline: the batch normalization \"", layer->name(), "\" of a stage is over ",
                               layer->group().size(),
                               " ranks (convert_sync_batchnorm) that are not of the pipeline's mesh, so that pipelines "
                               "cannot agree on their microbatches: take both from one DeviceMesh, such as "
                               "mesh[\"data\"].group() and mesh[\"pipeline\"]"));
  }
  auto call = Call::all_reduce(buffer_of(std::span(&most_examples_, 1)), ReduceOp::max);
  call.purpose = kExamples;
  const auto mesh = mesh_of(pipeline);
  mesh.group().run(call, mesh.deadline());
}

StepOverRanks::~StepOverRanks() {
  for (const auto& layer : layers_) layer->set_weight(std::nullopt);
}

void StepOverRanks::set_weight(const std::function<double()>& weight, int last) {
  double given = pipeline_.rank() == last && examples_ > 0 ? weight() : 0;
  pipeline_.sum({&given, 1});
  for (const auto& layer : layers_) layer->set_weight(given);
}

void check_labels_count_alike(const char* caller, const Tensor& target, std::int64_t parts) {
  constexpr std::int64_t kIgnoreIndex = -100;
  if (target.scalar_type() != at::kLong || target.dim() == 0 || target.numel() == 0) return;
  const auto counted = target.ne(kIgnoreIndex);
  const auto all = counted.sum().item<std::int64_t>();
  if (all == target.numel()) return;
  for (const auto& part : counted.tensor_split(std::min(parts, target.size(0)))) {
    const auto here = part.sum().item<std::int64_t>();
    if (here * target.size(0) == all * part.size(0)) continue;
    throw InvalidArgument(
        text(caller, ": ", target.numel() - all, " of ", target.numel(), " labels are ", kIgnoreIndex,
             ", and a part of ", part.size(0), " of ", target.size(0), " examples has ", here, " of the ", all,
             " others, so that its mean loss is not over its examples. Give a sum, with Reduction::Sum, and a weight, "
             "the number of labels that count: step(x, target, sum, weight)"));
  }
}

}  // namespace lockstep::parallel
