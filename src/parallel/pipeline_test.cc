// Pipelines against one process that trains the whole model, in double precision.
#include "lockstep/parallel/pipeline.h"

#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "collective/on_ranks_testing.h"
#include "collective/ranks_testing.h"
#include "lockstep/parallel/device_mesh.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/tensor_parallel.h"
#include "parallel/split_linear.h"
#include "parallel/transformer_testing.h"

namespace lockstep::parallel {
namespace {

constexpr int kPipelineSteps = 50;
constexpr double kPipelineTolerance = 1e-9;

struct Case {
  MakePipelineSchedule schedule;
  int ranks, stages, microbatches;
  bool recompute = false;
};

// 9 and 10 examples, which microbatches do not divide.
Batch pipeline_batch(int step) { return make_batch(step, 9 + step % 2); }

const TransformerOptions kPipelineOptions{.layers = 6};

std::vector<PipelineStage> stages_of(int count) {
  std::vector<PipelineStage> stages;
  for (int i = 0; i < count; ++i) stages.emplace_back([=] { return make_transformer(kPipelineOptions, i, count); });
  return stages;
}

Parameters train_unsplit() {
  auto net = make_transformer(kPipelineOptions);
  torch::optim::AdamW adamw(net->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < kPipelineSteps; ++step) {
    const auto batch = pipeline_batch(step);
    adamw.zero_grad();
    cross_entropy(net->forward(batch.ids), batch.labels).backward();
    adamw.step();
  }
  return parameters_of(*net);
}

TEST(Pipeline, TrainsAsOneProcess) {
  const auto expected = train_unsplit();
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
      for (int step = 0; step < kPipelineSteps; ++step) {
        const auto batch = pipeline_batch(step);
        adamw.zero_grad();
        pipeline.step(batch.ids, batch.labels, cross_entropy);
        adamw.step();
      }
      for (const auto& [stage, module] : pipeline.modules())
        EXPECT_LT(largest_difference(parameters_of(*module), expected), kPipelineTolerance);
    });
  }
}

TEST(Pipeline, PredictsAndEvaluatesOnAllRanks) {
  const auto expected = make_transformer(kPipelineOptions)->forward(pipeline_batch(0).ids);
  collective::on_ranks(3, [&](const Group& group) {
    Pipeline pipeline(stages_of(3), {group, 30}, {.microbatches = 4});
    EXPECT_TRUE(at::allclose(pipeline.forward(pipeline_batch(0).ids), expected));
    EXPECT_TRUE(pipeline.parameters()[0].grad().defined() == false);
  });
}

TEST(Pipeline, TakesFewerExamplesThanMicrobatches) {
  const auto batch = make_batch(0, 2, kPipelineOptions);
  auto whole = make_transformer(kPipelineOptions);
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

// Each has links of its own, on which a rank of another one would wait for the deadline.
TEST(Pipeline, RanksInAnotherPipelineAreToldWhich) {
  for (const bool trains_on_both : {true, false}) {
    const auto errors = collective::run_ranks({.group = {.backend = "threads"}}, [&](const Group& group) {
      Pipeline first(stages_of(2), {group, 300}, {.microbatches = 2});
      Pipeline second(stages_of(2), {group, 300}, {.microbatches = 2});
      const auto batch = make_batch(0, 4);
      if (group.rank() == 0) {
        first.step(batch.ids, batch.labels, cross_entropy);
      } else if (trains_on_both) {
        second.step(batch.ids, batch.labels, cross_entropy);
      } else {
        first.forward(batch.ids);
      }
    });
    for (const auto& error : errors) {
      ASSERT_NE(error, nullptr);
      const auto said = message_of<InvalidArgument>([&] { std::rethrow_exception(error); });
      expect_says(said, "for a step of Pipeline 1, rank 1 calls all_reduce of 4 x int64, max, for ");
      expect_says(said, trains_on_both ? "for a step of Pipeline 2" : "for a forward of Pipeline 1");
    }
  }
}

at::Tensor squares(const at::Tensor& y, const at::Tensor& target) { return (y - target).pow(2).sum(); }

torch::nn::Linear make_linear(double phase) {
  torch::nn::Linear layer(4, 4);
  layer->to(at::kDouble);
  const at::NoGradGuard no_gradient;
  layer->weight.copy_(at::sin(at::arange(16, at::kDouble) + phase).view({4, 4}));
  layer->bias.copy_(at::cos(at::arange(4, at::kDouble) + phase));
  return layer;
}

// Ranks of two pipelines gather the shards together, with 3 examples and 1 or none, for 2 microbatches.
TEST(Pipeline, ShardedStagesComputeAsManyMicrobatchesOnAllRanks) {
  const auto x = at::sin(at::arange(16, at::kDouble)).view({4, 4}), y = x.flip(-1);
  for (const std::int64_t first : {3, 4}) {
    auto one = make_linear(0), two = make_linear(1);
    const auto loss = squares(two(one(x)), y) / 4;
    loss.backward();
    collective::on_ranks(4, [&](const Group& group) {
      const DeviceMesh mesh({{"shard", 2}, {"pipeline", 2}}, {group, 30});
      Pipeline pipeline({[] { return make_linear(0); }, [] { return make_linear(1); }}, mesh["pipeline"],
                        {.microbatches = 2});
      FullyShardedParameters sharded(mesh["shard"]);
      for (const auto& [stage, module] : pipeline.modules()) sharded.add(*module, std::to_string(stage));
      const bool is_first = mesh.coordinate("shard") == 0;
      const auto begin = is_first ? 0 : first, count = is_first ? first : 4 - first;
      pipeline.step(x.narrow(0, begin, count), y.narrow(0, begin, count), squares, [](const auto&) { return 2.0; });
      double found = 0, expected = 0;
      for (const auto& shard : sharded.parameters()) found += shard.grad().sum().item<double>();
      for (const auto& layer : {one, two}) {
        for (const auto& parameter : layer->parameters()) expected += parameter.grad().sum().item<double>();
      }
      Communicator(group, 30).sum({&found, 1});
      EXPECT_NEAR(found, expected, 1e-10);
    });
  }
}

TEST(Pipeline, TiedCopiesAreFrozenTogetherAndNotSharded) {
  const std::vector<std::vector<StageParameter>> tied{{{0, "weight"}, {1, "weight"}}};
  const auto x = at::sin(at::arange(16, at::kDouble)).view({4, 4});
  collective::on_ranks(2, [&](const Group& group) {
    const auto frozen = [&](bool second) {
      return [=] {
        auto layer = make_linear(second ? 1 : 0);
        layer->weight.set_requires_grad(!second);
        return layer;
      };
    };
    expect_says(message_of([&] {
                  Pipeline({frozen(false), frozen(true)}, {group, 30}, {.tied = tied});
                }),
                "shapes of tied parameters");
  });
  collective::on_ranks(2, [&](const Group& group) {
    Pipeline pipeline({[] { return make_linear(0); }, [] { return make_linear(1); }}, {group, 30}, {.tied = tied});
    if (group.rank() == 1) pipeline.parameters()[0].set_requires_grad(false);
    expect_says(message_of([&] { pipeline.step(x, x, squares, [](const auto&) { return 4.0; }); }),
                "of the 2 copies 1 is trained; freeze all of them, or none");
  });
  collective::on_ranks(2, [&](const Group& group) {
    const DeviceMesh mesh({{"shard", 1}, {"pipeline", 2}}, {group, 30});
    Pipeline pipeline({[] { return make_linear(0); }, [] { return make_linear(1); }}, mesh["pipeline"], {.tied = tied});
    FullyShardedParameters sharded(mesh["shard"]);
    sharded.add(*pipeline.modules()[0].second);
    expect_says(message_of([&] { pipeline.step(x, x, squares, [](const auto&) { return 4.0; }); }),
                "is tied to parameters of other stages, and fully_shard has divided it");
  });
}

// The gradients of linear layers' weights are made in backward_weight, not before.
TEST(Pipeline, SplitsBackward) {
  collective::on_ranks(1, [&](const Group& group) {
    auto layer = torch::nn::Linear(64, 48);
    const auto x = torch::randn({32, 64}).requires_grad_();
    Pipeline pipeline({[&] { return layer; }}, group, {.schedule = schedules::zero_bubble, .microbatches = 1});
    const auto later = std::make_shared<WeightGradients>();
    {
      const auto leaving = leave_weights_to(later);
      layer(x).sum().backward();
    }
    EXPECT_TRUE(x.grad().defined());
    EXPECT_FALSE(layer->weight.grad().defined());
    later->compute();
    EXPECT_TRUE(at::allclose(layer->weight.grad(), x.sum(0).expand({48, 64}), 1e-4, 1e-5));
  });
}

// Compares by the file, which another tool reads.
TEST(Pipeline, TimelineAgreesWithTheSchedule) {
  const auto folder = fresh_folder("parallel", "timeline");
  collective::on_ranks(3, [&](const Group& group) {
    Pipeline pipeline(stages_of(3), {group, 30}, {.schedule = schedules::zero_bubble, .microbatches = 6});
    const auto batch = pipeline_batch(0);
    pipeline.step(batch.ids, batch.labels, cross_entropy);
    pipeline.write_timeline(folder / "step.json");
    if (group.rank() != 0) return;
    const auto events = nlohmann::json::parse(std::ifstream(folder / "step.json")).at("traceEvents");
    std::map<int, std::vector<nlohmann::json>> tracks;
    for (const auto& event : events) {
      if (event.at("ph") == "X") tracks[static_cast<int>(event.at("tid"))].push_back(event);
    }
    ASSERT_EQ(tracks.size(), 3U);
    for (const auto& [rank, track] : tracks) {
      const auto& actions = pipeline.schedule().actions[static_cast<std::size_t>(rank)];
      ASSERT_EQ(track.size(), actions.size());
      double end = 0;
      for (std::size_t i = 0; i < actions.size(); ++i) {
        const char* const names[] = {"forward", "backward", "backward_input", "backward_weight"};
        EXPECT_EQ(track[i].at("name"), names[static_cast<std::size_t>(actions[i].kind)]);
        EXPECT_EQ(track[i].at("args").at("stage"), actions[i].stage);
        EXPECT_EQ(track[i].at("args").at("microbatch"), actions[i].microbatch);
        EXPECT_GE(static_cast<double>(track[i].at("ts")), end);
        end = static_cast<double>(track[i].at("ts")) + static_cast<double>(track[i].at("dur"));
      }
    }
    // A stage gets a microbatch after the stage before has begun it.
    const auto begin_of = [&](const char* name, int stage, int microbatch) {
      for (const auto& event : tracks.at(stage)) {
        if (event.at("name") == name && event.at("args").at("microbatch") == microbatch)
          return static_cast<double>(event.at("ts"));
      }
      return -1.0;
    };
    for (int stage = 0; stage < 2; ++stage) {
      for (int i = 0; i < 6; ++i) {
        EXPECT_GE(begin_of("forward", stage + 1, i), begin_of("forward", stage, i));
        EXPECT_GE(begin_of("backward_input", stage, i), begin_of("backward_input", stage + 1, i));
      }
    }
  });
}

TEST(Pipeline, CallsHooksOfGradients) {
  collective::on_ranks(1, [&](const Group& group) {
    for (const bool recompute : {false, true}) {
      torch::nn::Linear layer(3, 4);
      layer->weight.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
      Pipeline pipeline({[&] { return layer; }}, group,
                        {.schedule = schedules::zero_bubble, .microbatches = 2, .recompute = recompute});
      const auto x = torch::randn({4, 3});
      pipeline.step(x, x, [](const at::Tensor& y, const at::Tensor&) { return y.sum(1).mean(); });
      EXPECT_TRUE(at::allclose(layer->weight.grad(), 2 * x.mean(0).expand({4, 3}), 1e-5, 1e-6)) << recompute;
    }
  });
}

TEST(Pipeline, LeavesFrozenTiedParametersWithoutGradients) {
  collective::on_ranks(2, [&](const Group& group) {
    std::vector<PipelineStage> stages;
    for (int i = 0; i < 2; ++i) {
      stages.emplace_back([i] {
        auto stage = make_transformer(kPipelineOptions, i, 2);
        for (const auto& each : stage->named_parameters()) {
          if (each.key().find("token") != std::string::npos || each.key().find("head") != std::string::npos)
            each.value().set_requires_grad(false);
        }
        return stage;
      });
    }
    Pipeline pipeline(stages, {group, 30}, {.tied = {{{0, "0.token.weight"}, {1, "7.head.weight"}}}});
    const auto batch = pipeline_batch(0);
    pipeline.step(batch.ids, batch.labels, cross_entropy);
    for (const auto& parameter : pipeline.parameters())
      EXPECT_EQ(parameter.grad().defined(), parameter.requires_grad());
  });
}

// The text of what a step throws, by rank; empty where a step throws nothing.
std::vector<std::string> errors_of(const std::function<void(Pipeline& pipeline, int rank)>& step) {
  std::vector<std::string> errors(2);
  collective::on_ranks(2, [&](const Group& group) {
    Pipeline pipeline(stages_of(2), {group, 30}, {.microbatches = 3});
    try {
      step(pipeline, group.rank());
    } catch (const std::exception& error) {
      errors[static_cast<std::size_t>(group.rank())] = error.what();
    }
  });
  return errors;
}

TEST(Pipeline, AnErrorInAStageEndsAllRanks) {
  const auto batch = pipeline_batch(0);
  const auto loss = [](const at::Tensor& logits, const at::Tensor& labels) {
    return cross_entropy(logits, labels).unsqueeze(0).expand({2});
  };
  const auto errors = errors_of([&](Pipeline& pipeline, int) { pipeline.step(batch.ids, batch.labels, loss); });
  for (const auto& error : errors) expect_says(error, "the loss has shape [2]");
}

TEST(Pipeline, RefusesBatchesThatDifferBetweenRanks) {
  const auto errors = errors_of([&](Pipeline& pipeline, int rank) {
    const auto batch = make_batch(0, 8 - 2 * rank);
    pipeline.step(batch.ids, batch.labels, cross_entropy);
  });
  for (const auto& error : errors) expect_says(error, "all of the pipeline give 6 to 8: they must give the same batch");
}

at::Tensor sum_of_counted(const at::Tensor& output, const at::Tensor& labels) {
  return at::cross_entropy_loss(output.flatten(0, 1), labels.flatten(), {}, at::Reduction::Sum);
}

TEST(Pipeline, WeighsMicrobatchesByTheLabelsThatCount) {
  auto batch = pipeline_batch(0);
  batch.labels.narrow(0, 0, 3).fill_(-100);  // a whole microbatch of 5, and two thirds of another one's first
  batch.labels.select(0, 4).narrow(0, 2, 7).fill_(-100);
  auto whole = make_transformer(kPipelineOptions);
  const auto expected = cross_entropy(whole(batch.ids), batch.labels);
  expected.backward();
  const auto all = parameters_of(*whole);
  collective::on_ranks(2, [&](const Group& group) {
    Pipeline pipeline(stages_of(2), {group, 30}, {.microbatches = 5});
    const double loss = pipeline.step(batch.ids, batch.labels, sum_of_counted,
                                      [](const at::Tensor& labels) { return labels.ne(-100).sum().item<double>(); });
    EXPECT_NEAR(loss, expected.item<double>(), 1e-12);
    for (const auto& [name, parameter] : parameters_of(*pipeline.modules()[0].second)) {
      EXPECT_TRUE(at::allclose(parameter.grad(), all.at(name).grad(), 1e-9, 1e-12)) << name;
    }
  });
}

TEST(Pipeline, RefusesMeansOverOtherThanExamples) {
  auto batch = pipeline_batch(0);
  const auto step = [&](Pipeline& pipeline, int) { pipeline.step(batch.ids, batch.labels, cross_entropy); };
  batch.labels.narrow(1, 3, 2).fill_(-100);  // as many of each example
  for (const auto& error : errors_of(step)) EXPECT_EQ(error, "");
  batch.labels.narrow(0, 0, 1).fill_(-100);
  for (const auto& error : errors_of(step)) expect_says(error, "so that its mean loss is not over its examples");
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
    const auto batch = pipeline_batch(0);
    expect_says(
        message_of<InvalidArgument>([&] { pipeline.step(batch.ids, batch.labels.narrow(0, 0, 3), cross_entropy); }),
        "count the same examples");
  });
}

}  // namespace
}  // namespace lockstep::parallel
