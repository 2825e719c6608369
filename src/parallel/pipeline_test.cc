// Pipelines against one process that trains the whole model, in double precision.
#include "lockstep/parallel/pipeline.h"

#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "lockstep/parallel/device_mesh.h"
#include "lockstep/parallel/tensor_parallel.h"
#include "parallel/split_linear.h"
#include "parallel/transformer_testing.h"

namespace lockstep::parallel {
namespace {

constexpr int kSteps = 50;
constexpr double kTolerance = 1e-9;

struct Case {
  MakePipelineSchedule schedule;
  int ranks, stages, microbatches;
  bool recompute = false;
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
  for (const auto& [schedule, ranks, stages, microbatches, recomputes] :
       {Case{schedules::gpipe, 2, 2, 4}, Case{schedules::one_forward_one_backward, 3, 3, 5},
        Case{schedules::one_forward_one_backward, 1, 1, 2}, Case{schedules::one_forward_one_backward, 4, 4, 8},
        Case{schedules::interleaved, 2, 4, 4}, Case{schedules::zero_bubble, 4, 4, 8},
        Case{schedules::zero_bubble, 2, 2, 4}, Case{schedules::zero_bubble_v, 2, 4, 4},
        Case{schedules::zero_bubble, 2, 2, 4, true}, Case{schedules::one_forward_one_backward, 2, 2, 4, true},
        Case{schedules::zero_bubble_v, 4, 8, 12}}) {
    SCOPED_TRACE(testing::Message() << schedule(ranks, stages, microbatches, {{}}).name << " " << ranks);
    collective::on_ranks(ranks, [&, make = schedule, count = stages, parts = microbatches,
                                 again = recomputes](const Group& group) {
      Pipeline pipeline(stages_of(count), {group, 30}, {.schedule = make, .microbatches = parts, .recompute = again});
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

TEST(Pipeline, PredictsAndEvaluatesOnAllRanks) {
  const auto expected = make_transformer(kOptions)->forward(batch_of(0).ids);
  collective::on_ranks(3, [&](const Group& group) {
    Pipeline pipeline(stages_of(3), {group, 30}, {.microbatches = 4});
    EXPECT_TRUE(at::allclose(pipeline.forward(batch_of(0).ids), expected));
    EXPECT_TRUE(pipeline.parameters()[0].grad().defined() == false);
  });
}

TEST(Pipeline, TakesFewerExamplesThanMicrobatches) {
  const auto batch = make_batch(0, 2, kOptions);
  auto whole = make_transformer(kOptions);
  const auto loss = cross_entropy(whole(batch.ids), batch.labels);
  loss.backward();
  collective::on_ranks(2, [&](const Group& group) {
    Pipeline pipeline(stages_of(2), {group, 30}, {.schedule = schedules::zero_bubble, .microbatches = 4});
    EXPECT_NEAR(pipeline.step(batch.ids, batch.labels, cross_entropy), loss.item<double>(), 1e-12);
    for (const auto& [stage, module] : pipeline.modules()) {
      for (const auto& each : module->named_parameters()) {
        const auto& gradient = whole->named_parameters()[each.key()].grad();
        EXPECT_TRUE(at::allclose(each.value().grad(), gradient, 1e-9, 1e-12)) << each.key();
      }
    }
  });
}

// The gradients of linear layers' weights are made in backward_weight, not before.
TEST(Pipeline, SplitsBackward) {
  collective::on_ranks(1, [&](const Group& group) {
    auto layer = torch::nn::Linear(64, 48);
    const auto x = torch::randn({32, 64}).requires_grad_();
    Pipeline pipeline({[&] { return layer; }}, group, {.schedule = schedules::zero_bubble, .microbatches = 1});
    WeightGradients later;
    {
      const WeightGradients::Collect collect(later);
      layer(x).sum().backward();
    }
    EXPECT_TRUE(x.grad().defined());
    EXPECT_FALSE(layer->weight.grad().defined());
    later.compute();
    EXPECT_TRUE(at::allclose(layer->weight.grad(), x.sum(0).expand({48, 64}), 1e-4, 1e-5));
  });
}

TEST(Pipeline, AnErrorInAStageEndsAllRanks) {
  const auto groups = make_thread_groups(2);
  std::vector<std::string> errors(2);
  {
    std::vector<std::jthread> threads;
    for (std::size_t rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          Pipeline pipeline(stages_of(2), {groups[rank], 30}, {});
          const auto batch = batch_of(0);
          pipeline.step(batch.ids, batch.labels, [](const at::Tensor& logits, const at::Tensor& labels) {
            return cross_entropy(logits, labels).unsqueeze(0).expand({2});
          });
        } catch (const std::exception& error) {
          errors[rank] = error.what();
        }
      });
    }
  }
  for (const auto& error : errors) EXPECT_NE(error.find("the loss has shape [2]"), std::string::npos) << error;
}

TEST(Pipeline, RefusesWhatDoesNotFit) {
  collective::on_ranks(2, [&](const Group& group) {
    const auto make = [&](const PipelineOptions& options, int stages = 2) {
      Pipeline(stages_of(stages), {group, 30}, options);
    };
    expect_says(message_of<InvalidArgument>([&] { make({}, 3); }), "3 stages on 2 ranks");
    expect_says(message_of<InvalidArgument>([&] { make({.microbatches = 0}); }), "0 microbatches");
    expect_says(message_of<InvalidArgument>([&] {
                  make({.tied = {{{0, "0.token.weight"}, {2, "7.head.weight"}}}});
                }),
                "stage 2; there are 2 stages");
  });
  collective::on_ranks(1, [&](const Group& group) {
    expect_says(message_of<InvalidArgument>([&] {
                  Pipeline(stages_of(1), {group, 30}, {.tied = {{{0, "0.tokn.weight"}, {0, "7.head.weight"}}}});
                }),
                "stage 0 has no parameter \"0.tokn.weight\" to tie; did you mean 0.token.weight");
    Pipeline pipeline(stages_of(1), {group, 30}, {});
    const auto batch = batch_of(0);
    expect_says(
        message_of<InvalidArgument>([&] { pipeline.step(batch.ids, batch.labels.narrow(0, 0, 3), cross_entropy); }),
        "count the same examples");
  });
}

}  // namespace
}  // namespace lockstep::parallel
