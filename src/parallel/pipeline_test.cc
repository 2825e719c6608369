// Pipelines against one process that trains the whole model, in double precision.
#include "lockstep/parallel/pipeline.h"

#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "lockstep/parallel/device_mesh.h"
#include "lockstep/parallel/tensor_parallel.h"
#include "parallel/transformer_testing.h"

namespace lockstep::parallel {
namespace {

constexpr int kSteps = 50;
constexpr double kTolerance = 1e-9;

struct Case {
  MakePipelineSchedule schedule;
  int ranks, stages, microbatches;
};

// 9 and 10 examples, which microbatches do not divide.
Batch batch_of(int step) { return make_batch(step, 9 + step % 2); }

const TransformerOptions kOptions{.layers = 6};

std::vector<PipelineStage> stages_of(int count) {
  std::vector<PipelineStage> stages;
  for (int i = 0; i < count; ++i) stages.emplace_back([=] { return make_transformer(kOptions, i, count); });
  return stages;
}

Parameters train_whole() {
  auto net = make_transformer(kOptions);
  torch::optim::AdamW adamw(net->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < kSteps; ++step) {
    const auto batch = batch_of(step);
    adamw.zero_grad();
    cross_entropy(net->forward(batch.ids), batch.labels).backward();
    adamw.step();
  }
  return parameters_of(*net);
}

TEST(Pipeline, TrainsAsOneProcess) {
  const auto expected = train_whole();
  for (const auto& [schedule, ranks, stages, microbatches] :
       {Case{schedules::gpipe, 2, 2, 4}, Case{schedules::one_forward_one_backward, 3, 3, 5},
        Case{schedules::one_forward_one_backward, 1, 1, 2}, Case{schedules::one_forward_one_backward, 4, 4, 8},
        Case{schedules::interleaved, 2, 4, 4}, Case{schedules::zero_bubble, 4, 4, 8},
        Case{schedules::zero_bubble, 2, 2, 4}, Case{schedules::zero_bubble_v, 2, 4, 4},
        Case{schedules::zero_bubble_v, 4, 8, 12}}) {
    SCOPED_TRACE(testing::Message() << schedule(ranks, stages, microbatches, {{}}).name << " " << ranks);
    collective::on_ranks(ranks, [&, make = schedule, count = stages, parts = microbatches](const Group& group) {
      Pipeline pipeline(stages_of(count), {group, 30}, {.schedule = make, .microbatches = parts});
      torch::optim::AdamW adamw(pipeline.parameters(), torch::optim::AdamWOptions(1e-2));
      for (int step = 0; step < kSteps; ++step) {
        const auto batch = batch_of(step);
        adamw.zero_grad();
        pipeline.step(batch.ids, batch.labels, cross_entropy);
        adamw.step();
      }
      for (const auto& [stage, module] : pipeline.modules())
        EXPECT_LT(largest_difference(parameters_of(*module), expected), kTolerance);
    });
  }
}

}  // namespace
}  // namespace lockstep::parallel
