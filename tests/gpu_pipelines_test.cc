// Pipelines over simulated GPUs: the values of as many ranks on CPUs, in double precision. Within a step no activation
// and no gradient goes through host memory.
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <algorithm>

#include "parallel/transformer_testing.h"
#include "tests/on_gpus.h"

namespace lockstep {
namespace {

using parallel::cross_entropy;

constexpr int kPipelineSteps = 6;
const parallel::TransformerOptions kPipelineNet{.layers = 4, .width = 8, .head = 2, .sequence = 6, .classes = 24};

struct Staging {
  MakePipelineSchedule schedule;
  int ranks, stages, microbatches;
  bool recompute = false, tied = false;
};

// `tensor`: the ranks among which each stage is divided.
Values train_pipeline(const Staging& staging, int tensor, const Communicator& ranks, at::Device device) {
  const DeviceMesh mesh({{"pipeline", staging.ranks}, {"tensor", tensor}}, ranks);
  std::vector<PipelineStage> stages;
  for (int i = 0; i < staging.stages; ++i) {
    stages.emplace_back([&, i] {
      auto stage = parallel::make_transformer(kPipelineNet, i, staging.stages);
      stage->to(device);
      const auto names = stage->named_modules("", /*include_self=*/false).keys();
      ParallelPlan plan;
      for (const auto& [end, style] : ParallelPlan{{".qkv", ColwiseParallel()},
                                                   {".out", RowwiseParallel()},
                                                   {".up", ColwiseParallel()},
                                                   {".down", RowwiseParallel()}}) {
        const auto ends = [&, &end = end](const auto& name) { return name.ends_with(end); };
        if (std::ranges::any_of(names, ends)) plan.emplace_back("*" + end, style);
      }
      parallelize_module(stage, mesh["tensor"], plan);
      return stage;
    });
  }
  PipelineOptions options{
      .schedule = staging.schedule, .microbatches = staging.microbatches, .recompute = staging.recompute};
  if (staging.tied) options.tied = {{{0, "0.token.weight"}, {staging.stages - 1, "5.head.weight"}}};
  Pipeline pipeline(stages, mesh["pipeline"], options);
  torch::optim::AdamW adamw(pipeline.parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<parallel::Batch> batches;
  for (int i = 0; i < kPipelineSteps; ++i) {  // 9 and 10 examples, which microbatches do not divide
    const auto batch = parallel::make_batch(i, 9 + i % 2, kPipelineNet);
    batches.push_back({batch.ids.to(device), batch.labels.to(device)});
  }
  Values values;
  const auto step = [&](int i) {
    const auto& [ids, labels] = batches[static_cast<std::size_t>(i)];
    adamw.zero_grad();
    pipeline.forward_backward(ids, [&, &labels = labels](const Tensor& output, std::int64_t first, std::int64_t count) {
      return cross_entropy(output, labels.narrow(0, first, count)) * (static_cast<double>(count) / labels.size(0));
    });
    adamw.step();
  };
  step(0);
  expect_copies(ranks, 0, [&] {
    for (int i = 1; i + 1 < kPipelineSteps; ++i) step(i);
  });
  const auto& [ids, labels] = batches.back();
  adamw.zero_grad();
  expect_copies(ranks, 0, [&, &ids = ids, &labels = labels] {
    values["loss"] = at::scalar_tensor(pipeline.step(ids, labels, cross_entropy), at::kDouble);
  });
  adamw.step();
  double last = 0;
  for (const auto& span : pipeline.last_times()) {
    EXPECT_GE(span.begin, 0);
    EXPECT_GE(span.end, span.begin);
    last = std::max(last, span.end);
  }
  EXPECT_GT(last, 0);
  values["output"] = pipeline.forward(ids);
  EXPECT_EQ(values["output"].device().type(), device.type());
  for (const auto& [stage, module] : pipeline.modules()) {
    for (const auto& [name, value] : whole_parameters(*module)) values[name] = value;
  }
  return values;
}

TEST_F(ParallelOnGpus, PipelinesTrainAsOnCpus) {
  for (const auto& staging :
       {Staging{schedules::gpipe, 2, 2, 4}, Staging{schedules::one_forward_one_backward, 2, 2, 4, true},
        Staging{schedules::one_forward_one_backward, 3, 3, 5, false, true}, Staging{schedules::interleaved, 2, 4, 4},
        Staging{schedules::interleaved, 3, 6, 6}, Staging{schedules::zero_bubble, 3, 3, 6},
        Staging{schedules::zero_bubble_v, 2, 4, 4}, Staging{schedules::zero_bubble_v, 3, 6, 6}}) {
    SCOPED_TRACE(testing::Message() << staging.schedule(staging.ranks, staging.stages, staging.microbatches, {{}}).name
                                    << " on " << staging.ranks);
    expect_as_on_cpus(staging.ranks, [&](const Communicator& ranks, at::Device device) {
      return train_pipeline(staging, 1, ranks, device);
    });
  }
}

TEST_F(ParallelOnGpus, PipelinesOfDividedStagesTrainAsOnCpus) {
  const Staging staging{schedules::one_forward_one_backward, 2, 2, 4};
  expect_as_on_cpus(
      4, [&](const Communicator& ranks, at::Device device) { return train_pipeline(staging, 2, ranks, device); });
}

// Keeps the sizes of its input.
struct ScaleAllImpl : torch::nn::Module {
  ScaleAllImpl() : weight(register_parameter("weight", torch::full({1}, 0.9, torch::kDouble))) {}
  Tensor forward(const Tensor& x) { return (x * weight).sin(); }
  Tensor weight;
};
TORCH_MODULE(ScaleAll);

// Gradients of a pipeline whose messages have `elements` elements.
Values gradients_of_scales(const Staging& staging, std::int64_t elements, const Communicator& ranks,
                           at::Device device) {
  std::vector<PipelineStage> stages;
  for (int i = 0; i < staging.stages; ++i) {
    stages.emplace_back([&] {
      ScaleAll stage;
      stage->to(device);
      return stage;
    });
  }
  Pipeline pipeline(stages, ranks, {.schedule = staging.schedule, .microbatches = staging.microbatches});
  const auto x = at::arange(staging.microbatches, at::TensorOptions(device).dtype(at::kDouble));
  pipeline.forward_backward(x.unsqueeze(1).expand({-1, elements}).contiguous(),
                            [](const Tensor& y, std::int64_t, std::int64_t) { return y.mean(); });
  Values values;
  for (const auto& [stage, module] : pipeline.modules()) values[std::to_string(stage)] = module->parameters()[0].grad();
  return values;
}

// As NCCL's, such sends end only when they are received: the sockets of the simulated NCCL cannot hold them.
TEST_F(ParallelOnGpus, SendsThatWaitForTheirReceiversHoldBackNothing) {
  constexpr std::int64_t kElements = 1'500'000;  // 12 MB
  for (const auto& staging :
       {Staging{schedules::one_forward_one_backward, 3, 3, 4}, Staging{schedules::interleaved, 2, 4, 2}}) {
    SCOPED_TRACE(testing::Message() << staging.ranks << " ranks, " << staging.stages << " stages");
    expect_as_on_cpus(staging.ranks, [&](const Communicator& ranks, at::Device device) {
      return gradients_of_scales(staging, kElements, ranks, device);
    });
  }
}

TEST_F(ParallelOnGpus, PipelinesGoThroughHostMemoryWhereTheyMust) {
  const Staging staging{schedules::interleaved, 3, 6, 6};
  expect_through_host(3, [&](const Communicator& ranks, at::Device device) {
    return gradients_of_scales(staging, 100, ranks, device);
  });
}

// A stage that fails tells the ranks that wait for its messages.
TEST_F(ParallelOnGpus, AStageThatFailsEndsTheStepOnAllRanks) {
  std::vector<std::string> said(3);
  collective::on_ranks(3, [&](const Group& group) {
    const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(group.rank()));
    const c10::DeviceGuard guard(device);
    bool fails = false;
    std::vector<PipelineStage> stages;
    for (int i = 0; i < 3; ++i) {
      stages.emplace_back([&] {
        torch::nn::Linear layer(4, 4);
        layer->to(device, at::kDouble);
        return torch::nn::Sequential(layer);
      });
    }
    Pipeline pipeline(stages, {group, 60}, {.microbatches = 4});
    const auto x = at::ones({8, 4}, at::TensorOptions(device).dtype(at::kDouble));
    const auto loss = [&](const Tensor& output, std::int64_t first, std::int64_t) {
      if (fails && first > 0) throw InvalidArgument("as asked for");
      return output.sum();
    };
    pipeline.forward_backward(x, loss);
    fails = true;
    try {
      pipeline.forward_backward(x, loss);
    } catch (const std::exception& error) {
      said[static_cast<std::size_t>(group.rank())] = error.what();
    }
  });
  for (const auto& each : said) EXPECT_NE(each.find("as asked for"), std::string::npos) << each;
}

}  // namespace
}  // namespace lockstep
