#include "lockstep/parallel/pipeline.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "base/median.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "parallel/exchange.h"
#include "parallel/gradients.h"
#include "parallel/mesh_backend.h"
#include "parallel/pipeline_run.h"
#include "parallel/sharded_units.h"
#include "parallel/tied_parameters.h"

namespace lockstep {
namespace {

// Steps are slower at first.
constexpr int kStepsBeforeCosts = 3;

constexpr auto kAll = std::numeric_limits<std::int64_t>::max();  // microbatches

// Ranks that send to each other: where neighbouring stages are on different ranks.
std::vector<std::pair<int, int>> pairs_of(const PipelineSchedule& schedule) {
  std::vector<std::pair<int, int>> pairs;
  for (int stage = 0; stage + 1 < schedule.stages(); ++stage) {
    const auto a = schedule.rank_of_stage[static_cast<std::size_t>(stage)];
    const auto b = schedule.rank_of_stage[static_cast<std::size_t>(stage) + 1];
    if (a == b) continue;
    for (const auto& pair : {std::pair(a, b), std::pair(b, a)}) {
      if (std::ranges::find(pairs, pair) == pairs.end()) pairs.push_back(pair);
    }
  }
  return pairs;
}

// `ranks`: those of the whole mesh, which may wait for this one along another axis.
void check_examples(const Tensor& x, const Tensor& target, const Communicator& ranks) {
  if (x.dim() > 0 && target.dim() > 0 && target.size(0) == x.size(0)) return;
  ranks.abort_on_error([&] {
    throw InvalidArgument(text("Pipeline::step: x has shape ", x.sizes(), " and target ", target.sizes(),
                               "; their first dimensions count the same examples"));
  });
}

// Calls train(loss), and returns the sum on all ranks. The losses stay on their device until all are there, so that the
// host waits once.
template <class Train>
double sum_of_losses(const Train& train, const Communicator& ranks, const MicrobatchLoss& loss) {
  std::vector<Tensor> losses;
  train([&](const Tensor& output, std::int64_t first, std::int64_t count) {
    auto of_microbatch = loss(output, first, count);
    if (of_microbatch.numel() == 1) losses.push_back(of_microbatch.detach().reshape({}).to(at::kDouble));
    return of_microbatch;
  });
  double sum = losses.empty() ? 0 : at::stack(losses).sum().item<double>();
  ranks.sum({&sum, 1});
  return sum;
}

using nlohmann::json;

constexpr double kMicroseconds = 1e6;

// One rank's events: a JSON array. `times` of `actions`, in seconds since `began`.
std::string timeline_events(const std::vector<PipelineAction>& actions, const std::vector<PipelineTimes::Span>& times,
                            int rank, double began) {
  json events{
      {{"ph", "M"}, {"pid", 0}, {"tid", rank}, {"name", "thread_name"}, {"args", {{"name", text("rank ", rank)}}}}};
  for (std::size_t i = 0; i < times.size(); ++i) {
    events.push_back({{"ph", "X"},
                      {"pid", 0},
                      {"tid", rank},
                      {"name", name_of(actions[i].kind)},
                      {"ts", kMicroseconds * (began + times[i].begin)},
                      {"dur", kMicroseconds * (times[i].end - times[i].begin)},
                      {"args", {{"stage", actions[i].stage}, {"microbatch", actions[i].microbatch}}}});
  }
  return events.dump();
}

void write_events(const std::string& path, const std::vector<std::string>& events_of_ranks) {
  json all = json::array();
  for (const auto& events : events_of_ranks) {
    for (auto& event : json::parse(events)) all.push_back(std::move(event));
  }
  std::ofstream out(path);
  out << json{{"traceEvents", std::move(all)}, {"displayTimeUnit", "ms"}};
  out.close();
  if (!out) throw IoError(text("cannot write ", path, ": ", std::strerror(errno)));
}

PipelineSchedule checked(PipelineSchedule schedule, int ranks) {
  if (schedule.ranks() != ranks) {
    throw InvalidArgument(
        text("Pipeline: schedule ", schedule.name, " is made for ", schedule.ranks(), " ranks; there are ", ranks));
  }
  check_schedule(schedule);
  return schedule;
}

}  // namespace

struct Pipeline::State {
  State(std::vector<PipelineStage> of, const Communicator& given, PipelineOptions with)
      : stages(std::move(of)), ranks(given), options(std::move(with)), schedule(make_schedule({{}})) {
    links.emplace(ranks, pairs_of(schedule));
    for (int i = 0; i < schedule.stages(); ++i) {
      const auto& stage = stages[static_cast<std::size_t>(i)];
      const auto module = stage.make();
      if (schedule.rank_of_stage[static_cast<std::size_t>(i)] != ranks.rank()) continue;
      modules.emplace_back(i, module);
      if (options.recompute) {
        forwards.emplace(
            i, [&stage, module](const Tensor& x) { return internal::recompute(module, stage.forward_function(), x); });
      } else {
        forwards.emplace(i, [&stage, module](const Tensor& x) { return stage.forward(*module, x); });
      }
    }
    for (auto& stage : stages) stage.forget_make();  // it may hold all layers
    for (const auto& copies : options.tied) tied.emplace_back(copies, schedule, modules, ranks);
    split_weights();
    name_purposes();
    ranks.group().barrier(ranks.deadline());
    zero = Deadline::Clock::now();
  }

  PipelineSchedule make_schedule(const std::vector<PipelineCosts>& costs) const {
    auto made = options.schedule(ranks.size(), static_cast<int>(stages.size()), options.microbatches, costs);
    return checked(std::move(made), ranks.size());
  }

  void choose_order(const std::vector<PipelineCosts>& costs) {
    auto chosen = make_schedule(costs);
    if (chosen.rank_of_stage != schedule.rank_of_stage || chosen.microbatches != schedule.microbatches)
      throw InvalidArgument(
          text("Pipeline: schedule ", chosen.name, " has other stages or microbatches for other costs"));
    schedule = std::move(chosen);
  }

  // Purposes are numbered anew after a regroup, on all ranks.
  void name_purposes() {
    const auto name = text("Pipeline ", ranks.group().next_number() + 1);
    stepping = Purpose("a step of " + name);
    predicting = Purpose("a forward of " + name);
    ranks_for_losses = ranks.with_purpose(Purpose("the losses of " + name));
    ranks_for_outputs = ranks.with_purpose(Purpose("the outputs of " + name));
    ranks_for_costs = ranks.with_purpose(Purpose("the measured costs of " + name));
  }

  // How a pipeline's stages are called.
  enum class Called { alone, with_other_ranks, with_layers_over_ranks };

  // Links are of one pipeline alone: a rank that is in another one would wait on other links, to no end. So all first
  // tell what they begin, and whether ranks of other pipelines call the stages' modules together with these: modules
  // may be sharded after they were made. Throws InvalidArgument where they have other numbers of examples.
  // Collective.
  Called begin(Purpose purpose, const parallel::StepOverRanks::Layers& layers, const Tensor& x) {
    const auto examples = x.dim() > 0 ? x.size(0) : 0;
    for (const auto& each : tied) each.check_not_sharded();
    const bool with_others = std::ranges::any_of(
        modules, [](const auto& each) { return parallel::is_called_with_other_ranks(*each.second); });
    const auto called = !layers.empty() ? Called::with_layers_over_ranks
                        : with_others   ? Called::with_other_ranks
                                        : Called::alone;
    std::array largest{static_cast<std::int64_t>(called), examples, -examples, std::int64_t{x.is_cuda() ? 0 : 1}};
    auto call = Call::all_reduce(buffer_of(std::span(largest)), ReduceOp::max);
    call.purpose = purpose;
    ranks.group().run(call, ranks.deadline());
    if (largest[1] != -largest[2]) {
      throw InvalidArgument(text("Pipeline: rank ", ranks.rank(), " gives a batch of ", examples,
                                 " examples, and all of the pipeline give ", -largest[2], " to ", largest[1],
                                 ": they must give the same batch"));
    }
    device = largest[3] == 0 ? x.device() : at::Device(at::kCPU);
    links->use(device);
    return static_cast<Called>(largest[0]);
  }

  // Those that train.
  parallel::StepOverRanks::Layers layers_over_ranks() const {
    parallel::StepOverRanks::Layers layers;
    for (const auto& [stage, module] : modules) {
      for (const auto& layer : gradient::layers_over_ranks(*module)) {
        if (layer->trains()) layers.push_back(layer);
      }
    }
    return layers;
  }

  void split_weights() const {
    for (const auto& [stage, module] : modules) {
      for (const auto& parameter : module->parameters()) {
        if (parameter.dim() == 2) ops::add_hook(parameter, std::make_shared<parallel::SplitWeight>(parameter));
      }
    }
  }

  // Calls act(run, most_microbatches), of which there may be fewer than given. `weight`: as StepOverRanks::set_weight;
  // null where there is no backward.
  template <class Act>
  void run(Purpose purpose, const Tensor& x, std::int64_t most_microbatches, const std::function<double()>& weight,
           const Act& act) {
    parallel::mesh_of(ranks).abort_on_error([&] {
      try {
        const auto layers = layers_over_ranks();
        const auto called = begin(purpose, layers, x);
        auto most = most_microbatches;
        std::optional<parallel::StepOverRanks> over_ranks;
        if (called == Called::with_layers_over_ranks) {
          over_ranks.emplace(layers, ranks, x.size(0));
          if (weight) over_ranks->set_weight(weight, schedule.rank_of_stage.back());
          most = std::min(most, over_ranks->most_examples());
        }
        parallel::PipelineRun run(schedule, *links, forwards, ranks.rank(), called != Called::alone);
        act(run, most);
      } catch (const std::exception& error) {
        links->abort(text("rank ", ranks.rank(), ": ", parallel::first_line(error)));
        throw;
      }
    });
  }

  void train(const Tensor& x, const MicrobatchLoss& loss, std::int64_t most_microbatches,
             const std::function<double()>& weight) {
    if (!at::GradMode::is_enabled()) throw InvalidArgument("Pipeline: gradients are off; use forward");
    for (auto& each : tied) each.begin_step();
    run(stepping, x, most_microbatches, weight, [&](parallel::PipelineRun& run, std::int64_t most) {
      step_began = Deadline::Clock::now();
      run.train(x, loss, most, times);
    });
    timed_actions = schedule.actions[static_cast<std::size_t>(ranks.rank())];
    parallel::mesh_of(ranks).abort_on_error([&] {
      for (auto& each : tied) each.finish_step();
    });
  }

  const std::vector<PipelineTimes::Span>& spans() { return times.spans(ranks.deadline()); }

  std::vector<PipelineStage> stages;
  const Communicator ranks;
  Communicator ranks_for_losses, ranks_for_outputs, ranks_for_costs;  // the same ranks
  Purpose stepping, predicting;
  const PipelineOptions options;
  PipelineSchedule schedule;
  at::Device device = at::kCPU;  // of this rank's x in the last step: a GPU on all ranks, or the CPU
  std::optional<parallel::StageLinks> links;
  parallel::StageModules modules;
  parallel::StageForwards forwards;
  std::vector<parallel::TiedParameter> tied;
  std::vector<PipelineAction> timed_actions;  // this rank's of the last step
  parallel::ActionTimes times;
  int steps = 0;
  Deadline::Clock::time_point zero, step_began;
};

Pipeline::Pipeline(std::vector<PipelineStage> stages, const Communicator& ranks, PipelineOptions options)
    : state_(std::make_unique<State>(std::move(stages), ranks, std::move(options))) {}
Pipeline::~Pipeline() = default;

double Pipeline::step(const Tensor& x, const Tensor& target, const PipelineLoss& loss) {
  const auto mesh = parallel::mesh_of(state_->ranks);
  check_examples(x, target, mesh);
  mesh.abort_on_error([&] {
    if (state_->ranks.rank() == state_->schedule.rank_of_stage.back())
      parallel::check_labels_count_alike("Pipeline::step", target, state_->options.microbatches);
  });
  const auto examples = static_cast<double>(x.size(0));
  return sum_of_losses([&](const MicrobatchLoss& part) { train_batch(x, part, kAll, [=] { return examples; }); },
                       state_->ranks_for_losses,
                       [&](const Tensor& output, std::int64_t first, std::int64_t count) {
                         return loss(output, target.narrow(0, first, count)) * (static_cast<double>(count) / examples);
                       });
}

double Pipeline::step(const Tensor& x, const Tensor& target, const PipelineLoss& sum, const PipelineWeight& weight) {
  check_examples(x, target, parallel::mesh_of(state_->ranks));
  std::optional<double> all;  // the batch's weight, on the last stage's rank
  const auto weight_of_all = [&] {
    if (!all) all = weight(target);
    return *all;
  };
  return sum_of_losses([&](const MicrobatchLoss& part) { train_batch(x, part, kAll, weight_of_all); },
                       state_->ranks_for_losses,
                       [&](const Tensor& output, std::int64_t first, std::int64_t count) {
                         return sum(output, target.narrow(0, first, count)) / weight_of_all();
                       });
}

void Pipeline::forward_backward(const Tensor& x, const MicrobatchLoss& loss, std::int64_t most_microbatches,
                                std::optional<double> weight) {
  const auto given = [&] {
    if (weight) return *weight;
    throw InvalidArgument(
        "Pipeline::forward_backward: give `weight`, such as the number of its examples, or 1 where losses are scaled "
        "so "
        "that all count alike: a stage has a batch normalization over ranks of other pipelines, whose backward depends "
        "on what this batch counts for in the mean of their gradients");
  };
  train_batch(x, loss, most_microbatches, given);
}

void Pipeline::train_batch(const Tensor& x, const MicrobatchLoss& loss, std::int64_t most_microbatches,
                           const std::function<double()>& weight) {
  state_->train(x, loss, most_microbatches, weight);
  if (++state_->steps == kStepsBeforeCosts) state_->choose_order(measured_costs());
}

// Some may have chosen another order of actions already, and others not.
void Pipeline::regroup() {
  state_->schedule = state_->make_schedule({{}});
  state_->steps = 0;
  state_->links.emplace(state_->ranks, pairs_of(state_->schedule));
  for (auto& each : state_->tied) each.regroup(state_->ranks);
  state_->name_purposes();
}

Tensor Pipeline::forward(const Tensor& x, std::int64_t most_microbatches) {
  Tensor output;
  state_->run(state_->predicting, x, most_microbatches, /*weight=*/nullptr,
              [&](parallel::PipelineRun& run, std::int64_t most) { output = run.predict(x, most); });
  // The others get to know its shape first.
  const auto last = state_->schedule.rank_of_stage.back();
  std::vector<std::int64_t> shape;
  if (output.defined()) {
    shape = output.sizes().vec();
    shape.insert(shape.begin(), static_cast<std::int64_t>(output.scalar_type()));
  }
  parallel::broadcast_values(shape, state_->ranks_for_outputs, last);
  const at::IntArrayRef sizes(shape.data() + 1, shape.size() - 1);
  if (!output.defined()) output = at::empty(sizes, x.options().dtype(static_cast<at::ScalarType>(shape[0])));
  output = output.to(state_->device).contiguous();
  auto call = on_stream_of(output, Call::broadcast(buffer_of(output), last));
  call.purpose = state_->ranks_for_outputs.purpose();
  state_->ranks.group().run(call, state_->ranks.deadline());
  return output.to(x.device());
}

std::vector<Tensor> Pipeline::parameters() const {
  std::vector<Tensor> all;
  for (const auto& [stage, module] : modules()) {
    const auto own = module->parameters();
    all.insert(all.end(), own.begin(), own.end());
  }
  return parallel::unique(all);
}

void Pipeline::train(bool on) const {
  for (const auto& [stage, module] : modules()) module->train(on);
}

const std::vector<std::pair<int, std::shared_ptr<torch::nn::Module>>>& Pipeline::modules() const {
  return state_->modules;
}

std::vector<PipelineCosts> Pipeline::measured_costs() const {
  constexpr std::size_t kKinds = 4;
  const auto& actions = state_->timed_actions;
  std::map<std::pair<int, PipelineAction::Kind>, std::vector<double>> seconds;
  const auto& times = state_->spans();
  for (std::size_t i = 0; i < times.size(); ++i) {
    seconds[{actions[i].stage, actions[i].kind}].push_back(times[i].end - times[i].begin);
  }
  std::vector<double> all(kKinds * static_cast<std::size_t>(state_->schedule.stages()));
  for (const auto& [key, values] : seconds) {
    all[kKinds * static_cast<std::size_t>(key.first) + static_cast<std::size_t>(key.second)] = median(values);
  }
  state_->ranks_for_costs.sum(all);
  // Pipelines of one mesh, which communicate within stages, must choose the same order.
  const auto mesh = parallel::mesh_of(state_->ranks);
  mesh.sum(all);
  for (double& cost : all) cost /= mesh.size();
  std::vector<PipelineCosts> costs;
  for (std::size_t i = 0; i < all.size(); i += kKinds) costs.push_back({all[i], all[i + 1] + all[i + 2], all[i + 3]});
  return costs;
}

void Pipeline::write_timeline(const std::string& path) const {
  const std::chrono::duration<double> began = state_->step_began - state_->zero;
  const auto events = timeline_events(state_->timed_actions, state_->spans(), state_->ranks.rank(), began.count());
  const auto all = state_->ranks.all_gather(events);
  state_->ranks.run_on_rank_0([&] { write_events(path, all); });
}

const PipelineSchedule& Pipeline::schedule() const { return state_->schedule; }
const std::vector<PipelineTimes::Span>& Pipeline::last_times() const { return state_->spans(); }

}  // namespace lockstep
