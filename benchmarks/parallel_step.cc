// Measures the time and memory of a step of a transformer that is split over processes. Rank 0 prints a line of JSON.
//   parallel_step --mode one
//   lockstep run -n 2 parallel_step --mode tensor
#include <lockstep/ops/memory.h>
#include <lockstep/parallel.h>
#include <torch/optim/adamw.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "../examples/arguments.h"
#include "gpt_layers.h"

using namespace lockstep;
using benchmarks::Gpt;

namespace {

struct Options {
  benchmarks::GptSizes sizes;
  std::string mode = "one", schedule = "1f1b";
  int batch = 8, microbatches = 8, steps = 15;
  int draw = 0;
};

const std::map<std::string, std::pair<MakePipelineSchedule, int>> kSchedules{
    {"gpipe", {schedules::gpipe, 1}},
    {"1f1b", {schedules::one_forward_one_backward, 1}},
    {"interleaved", {schedules::interleaved, 2}},
    {"zero_bubble", {schedules::zero_bubble, 1}},
    {"zero_bubble_v", {schedules::zero_bubble_v, 2}}};

ParallelPlan plan_of(const std::string& mode) {
  if (mode == "tensor") {
    return {{"*.qkv", ColwiseParallel()},
            {"*.out", RowwiseParallel()},
            {"*.up", ColwiseParallel()},
            {"*.down", RowwiseParallel()}};
  }
  const Layout sequence = Shard{1};
  return {{"*.token", RowwiseParallel{.output = sequence}},
          {"*.place", Shard{0}},
          {"*.norm*", SequenceParallel()},
          {"*.qkv", ColwiseParallel{.input = sequence}},
          {"*.out", RowwiseParallel{.output = sequence}},
          {"*.up", ColwiseParallel{.input = sequence}},
          {"*.down", RowwiseParallel{.output = sequence}},
          {"*.head", ColwiseParallel{.input = sequence}}};
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target) {
  return at::cross_entropy_loss(logits.flatten(0, 1), target.flatten());
}

// A line of the process's memory, in MiB: VmRSS, what is resident now, or VmHWM, its peak.
double memory_mib(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(name + ":")) return std::stod(line.substr(name.size() + 1)) / 1024;
  }
  return 0;
}

struct Step {
  std::function<void()> run;
  std::vector<at::Tensor> parameters;
  std::shared_ptr<Pipeline> pipeline = {};
};

Step make_step(const Options& options, const Communicator& ranks, const at::Tensor& x, const at::Tensor& y) {
  const auto layers = options.sizes.layers + 2;
  if (options.mode == "pipeline") {
    const auto [make, chunks] = kSchedules.at(options.schedule);
    const int count = chunks * ranks.size();
    std::vector<PipelineStage> stages;
    for (int i = 0; i < count; ++i) {
      // Blocks are shared out evenly; the first stage has the front and the last one the back as well.
      const auto cut = [&](std::int64_t at) {
        return at == 0 ? 0 : at == count ? layers : 1 + options.sizes.layers * at / count;
      };
      stages.emplace_back([sizes = options.sizes, begin = cut(i), end = cut(i + 1)] { return Gpt(sizes, begin, end); });
    }
    auto pipeline = std::make_shared<Pipeline>(stages, ranks,
                                               PipelineOptions{.schedule = make, .microbatches = options.microbatches});
    return {[=] { pipeline->step(x, y, cross_entropy); }, pipeline->parameters(), pipeline};
  }
  if (options.mode == "shard") {
    FullyShardedParameters parameters(ranks);
    const auto net = std::make_shared<benchmarks::GptImpl>(
        options.sizes, 0, layers,
        [&](const std::string& name, torch::nn::Module& layer) { parameters.add(layer, name); });
    auto sharded = std::make_shared<FullySharded<benchmarks::GptImpl>>(net, std::move(parameters));
    return {[=] { cross_entropy((*sharded)(x), y).backward(); }, sharded->parameters()};
  }
  Gpt net(options.sizes, 0, layers);
  if (options.mode == "one") return {[=]() mutable { cross_entropy(net(x), y).backward(); }, net->parameters()};
  parallelize_module(net, ranks, plan_of(options.mode));
  const auto loss = [ranks, whole = options.mode == "tensor"](const at::Tensor& logits, const at::Tensor& target) {
    return whole ? cross_entropy(logits, target) : vocabulary_parallel_cross_entropy(logits, target, ranks).mean();
  };
  return {[=]() mutable { loss(net(x), y).backward(); }, net->parameters()};
}

// The time that the schedule allows with the measured costs of stages, as a share of what it took: the median step.
nlohmann::json compare_with_schedule(const Pipeline& pipeline, const Communicator& ranks,
                                     const std::function<void()>& run) {
  std::vector<std::array<double, 3>> steps;  // share, seconds, idle share
  for (int i = 0; i < 11; ++i) {
    ranks.group().barrier(ranks.deadline());
    run();
    double end = 0;
    for (const auto& span : pipeline.last_times()) end = std::max(end, span.end);
    ranks.group().all_reduce(buffer_of(std::span(&end, 1)), ReduceOp::max, ranks.deadline());
    const auto times = predict_times(pipeline.schedule(), pipeline.measured_costs());
    steps.push_back({times.total / end, end, times.idle_share});
  }
  std::sort(steps.begin(), steps.end());
  const auto [share, seconds, idle] = steps[steps.size() / 2];
  return {{"of_schedule", share}, {"schedule_ms", 1e3 * seconds}, {"idle_share", idle}};
}

// Every schedule for `ranks` ranks.
void draw(int ranks, int microbatches) {
  for (const auto& [name, schedule] : kSchedules) {
    const auto made = schedule.first(ranks, schedule.second * ranks, microbatches, {{}});
    std::cout << name << ": " << std::lround(100 * predict_times(made).idle_share) << "% idle\n"
              << draw_schedule(made) << "\n";
  }
}

void measure(const Options& options) {
  at::set_num_threads(1);
  const DeviceMesh mesh({{"ranks", -1}});
  const auto& ranks = mesh["ranks"];
  torch::manual_seed(0);
  const auto ids = at::randint(256, {options.batch, options.sizes.sequence + 1}, at::kLong);
  const auto x = ids.narrow(1, 0, options.sizes.sequence).contiguous();
  const auto y = ids.narrow(1, 1, options.sizes.sequence).contiguous();
  const double before = memory_mib("VmRSS");
  auto step = make_step(options, ranks, x, y);
  torch::optim::AdamW adamw(step.parameters, torch::optim::AdamWOptions(1e-3));
  const auto window = [&] {
    ranks.group().barrier(ranks.deadline());
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < options.steps; ++i) {
      adamw.zero_grad();
      step.run();
      adamw.step();
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / options.steps;
  };
  window();
  double best = 1e9;
  const auto largest = [&](double value) {
    ranks.group().all_reduce(buffer_of(std::span(&value, 1)), ReduceOp::max, ranks.deadline());
    return value;
  };
  for (int i = 0; i < 4; ++i) best = std::min(best, largest(window()));
  nlohmann::json result{{"ms_per_step", 1e3 * best},
                        {"growth_mib", largest(memory_mib("VmHWM") - before)},
                        {"allocator_mib", largest(static_cast<double>(memory_stats().reserved_bytes) / (1 << 20))}};
  const int data = options.mode == "shard" ? ranks.size() : 1;
  result["samples_per_s"] = data * options.batch / best;
  if (step.pipeline) result.update(compare_with_schedule(*step.pipeline, ranks, step.run));
  if (ranks.rank() == 0) std::cout << result << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  Arguments arguments("Time of a step of a model that is split");
  arguments.option("--mode", options.mode).one_of({"one", "tensor", "sequence", "shard", "pipeline"});
  arguments.option("--schedule", options.schedule)
      .one_of({"gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_v"});
  arguments.option("--layers", options.sizes.layers);
  arguments.option("--width", options.sizes.width);
  arguments.option("--sequence", options.sizes.sequence);
  arguments.option("--batch", options.batch);
  arguments.option("--microbatches", options.microbatches);
  arguments.option("--steps", options.steps);
  arguments.option("--draw", options.draw, "draws the schedules for so many ranks, and ends");
  arguments.parse(argc, argv);
  try {
    if (options.draw > 0) {
      draw(options.draw, options.microbatches);
      return 0;
    }
    measure(options);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
