// Plans for the ranks that run, and measures a step of each split that the plan proposes. Rank 0 prints the plan's
// table, then a line of JSON.
//   lockstep run -n 2 plan_step --layers 8 --batch 32
#include <lockstep/parallel.h>
#include <torch/optim/adamw.h>

#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>

#include "../examples/arguments.h"
#include "base/median.h"
#include "gpt_layers.h"

using namespace lockstep;

namespace {

struct Options {
  benchmarks::GptSizes sizes;
  int batch = 8, rounds = 5, steps = 4;
  bool plan_only = false;
};

std::vector<PipelineStage> layers_of(const benchmarks::GptSizes& sizes) {
  std::vector<PipelineStage> layers{[=] { return std::make_shared<benchmarks::FrontImpl>(sizes); }};
  for (std::int64_t i = 0; i < sizes.layers; ++i)
    layers.emplace_back([=] { return std::make_shared<benchmarks::BlockImpl>(sizes); });
  layers.emplace_back([=] { return std::make_shared<benchmarks::BackImpl>(sizes); });
  return layers;
}

const ParallelPlan kTensor{{"*.qkv", ColwiseParallel()},
                           {"*.out", RowwiseParallel()},
                           {"*.up", ColwiseParallel()},
                           {"*.down", RowwiseParallel()}};

at::Tensor loss(const at::Tensor& logits, const at::Tensor& target, const Communicator&) {
  return at::cross_entropy_loss(logits.flatten(0, 1), target.flatten());
}

// A model that trains by a split.
class Training {
 public:
  Training(const Options& options, const Split& split, const Communicator& ranks)
      : mesh_(split.axes(), ranks),
        model_(layers_of(options.sizes), split, mesh_, kTensor),
        adamw_(model_.parameters(), torch::optim::AdamWOptions(1e-3)) {}

  // Seconds of each of some steps.
  std::vector<double> run(int steps, const at::Tensor& x, const at::Tensor& y) {
    std::vector<double> seconds;
    const auto& ranks = mesh_.ranks();
    ranks.group().barrier(ranks.deadline());
    for (int i = 0; i < steps; ++i) {
      const auto start = std::chrono::steady_clock::now();
      adamw_.zero_grad();
      model_.step(x, y, loss);
      adamw_.step();
      ranks.group().barrier(ranks.deadline());
      seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return seconds;
  }

 private:
  const DeviceMesh mesh_;
  SplitModel model_;
  torch::optim::AdamW adamw_;
};

void measure(const Options& options) {
  at::set_num_threads(1);
  const DeviceMesh job({{"ranks", -1}});
  const auto& ranks = job.ranks();
  torch::manual_seed(0);
  const auto ids = at::randint(256, {options.batch, options.sizes.sequence + 1}, at::kLong);
  const auto x = ids.narrow(1, 0, options.sizes.sequence).contiguous();
  const auto y = ids.narrow(1, 1, options.sizes.sequence).contiguous();
  const auto start = std::chrono::steady_clock::now();
  const auto plan = plan_parallel(layers_of(options.sizes), x, y, loss, ranks, {.tensor = kTensor});
  const std::chrono::duration<double> planning = std::chrono::steady_clock::now() - start;
  if (ranks.rank() == 0) std::cout << plan.table() << std::flush;
  nlohmann::json rows = nlohmann::json::array();
  std::vector<std::unique_ptr<Training>> trainings;
  std::vector<std::vector<double>> seconds(plan.candidates.size());  // medians of rounds
  for (const auto& each : plan.candidates) {
    if (options.plan_only || !each.refused.empty()) break;
    trainings.push_back(std::make_unique<Training>(options, each.split, ranks));
    trainings.back()->run(4, x, y);  // a pipeline chooses its order after the third
  }
  for (int round = 0; round < options.rounds; ++round) {
    for (std::size_t i = 0; i < trainings.size(); ++i) {
      trainings[i]->run(1, x, y);
      seconds[i].push_back(median(trainings[i]->run(options.steps, x, y)));
    }
  }
  for (std::size_t i = 0; i < trainings.size(); ++i) {
    const auto& planned = plan.candidates[i];
    rows.push_back({{"split", planned.split.describe()},
                    {"predicted_ms", 1e3 * planned.seconds},
                    {"measured_ms", 1e3 * median(seconds[i])},
                    {"predicted_mib", planned.memory.total() / (1 << 20)}});
  }
  if (ranks.rank() == 0) std::cout << nlohmann::json{{"planning_s", planning.count()}, {"rows", rows}} << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  Arguments arguments("A plan, and the measured steps of what it proposes");
  arguments.option("--layers", options.sizes.layers);
  arguments.option("--width", options.sizes.width);
  arguments.option("--sequence", options.sizes.sequence);
  arguments.option("--batch", options.batch);
  arguments.option("--rounds", options.rounds);
  arguments.option("--steps", options.steps, "of a split in a round");
  arguments.flag("--plan-only", options.plan_only);
  arguments.parse(argc, argv);
  try {
    measure(options);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
