// Batch normalization over the examples of several pipelines, against one process that computes each microbatch of all
// of them, in double precision.
#include <gtest/gtest.h>
#include <lockstep/ddp/sync_batch_norm.h>
#include <lockstep/lockstep.h>
#include <lockstep/parallel.h>
#include <torch/nn/modules/linear.h>

#include <numeric>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "collective/ranks_testing.h"

namespace lockstep {
namespace {

constexpr std::int64_t kWidth = 3, kPositions = 2;

// [examples, positions, width] to the same.
struct NormalizedImpl : torch::nn::Module {
  explicit NormalizedImpl(double phase, bool frozen = false)
      : linear(register_module("linear", torch::nn::Linear(kWidth, kWidth))),
        norm(register_module("norm", SyncBatchNorm(kWidth))) {
    to(at::kDouble);
    const at::NoGradGuard no_gradient;
    for (const auto& each : named_parameters()) {
      const auto numbers = at::arange(each.value().numel(), at::kDouble) * 0.7 + phase;
      each.value().copy_(at::sin(numbers).view(each.value().sizes()) + (each.key() == "norm.weight" ? 1 : 0));
      each.value().set_requires_grad(!frozen);
    }
  }
  at::Tensor forward(const at::Tensor& x) { return norm(at::tanh(linear(x)).transpose(1, 2)).transpose(1, 2); }
  torch::nn::Linear linear;
  SyncBatchNorm norm;
};
TORCH_MODULE(Normalized);

using StepValues = std::map<std::string, at::Tensor>;

// Gradients, running statistics and counts of batches.
void add_values(StepValues& values, const torch::nn::Module& module, const std::string& stage) {
  for (const auto& each : module.named_parameters())
    if (each.value().grad().defined()) values[stage + each.key()] = each.value().grad().clone();
  for (const auto& each : module.named_buffers()) values[stage + each.key()] = each.value().clone();
}

struct Rows {
  std::vector<std::int64_t> examples;  // of each pipeline
  int microbatches = 3;
  MakePipelineSchedule schedule = schedules::one_forward_one_backward;
  bool recomputes = false, frozen_end = false;

  std::int64_t all() const { return std::accumulate(examples.begin(), examples.end(), std::int64_t{0}); }
  std::int64_t first(std::size_t row) const {
    return std::accumulate(examples.begin(), examples.begin() + static_cast<std::ptrdiff_t>(row), std::int64_t{0});
  }
};

at::Tensor inputs(const Rows& rows) {
  return at::sin(at::arange(rows.all() * kPositions * kWidth, at::kDouble) * 1.3).view({-1, kPositions, kWidth});
}
at::Tensor targets(const Rows& rows) { return at::cos(inputs(rows) * 2); }
at::Tensor sum_of_squares(const at::Tensor& y, const at::Tensor& target) { return (y - target).pow(2).sum(); }

StepValues in_one_process(const Rows& rows) {
  Normalized front(0.0), back(1.0, rows.frozen_end);
  const auto x = inputs(rows), y = targets(rows);
  const auto count =
      std::min<std::int64_t>(rows.microbatches, *std::max_element(rows.examples.begin(), rows.examples.end()));
  double loss = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    std::vector<at::Tensor> parts, wanted;
    for (std::size_t row = 0; row < rows.examples.size(); ++row) {
      const auto part_of = [&](const at::Tensor& of) {
        return of.narrow(0, rows.first(row), rows.examples[row]).tensor_split(count)[static_cast<std::size_t>(i)];
      };
      parts.push_back(part_of(x));
      wanted.push_back(part_of(y));
    }
    const auto part = sum_of_squares(back(front(at::cat(parts))), at::cat(wanted)) / static_cast<double>(rows.all());
    part.backward();
    loss += part.item<double>();
  }
  StepValues values{{"loss", at::scalar_tensor(loss, at::kDouble)}};
  add_values(values, *front, "0.");
  add_values(values, *back, "1.");
  return values;
}

enum class How { mean, sum_by_own_weight, sum_by_weight_of_all, forward_backward };

Pipeline make_pipeline(const Rows& rows, const DeviceMesh& mesh) {
  const auto stage = [&](double phase, bool frozen) -> PipelineStage {
    return [&mesh, phase, frozen] {
      Normalized made(phase, frozen);
      convert_sync_batchnorm(*made, mesh["data"].group());
      return made;
    };
  };
  return Pipeline({stage(0.0, false), stage(1.0, rows.frozen_end)}, mesh["pipeline"],
                  {.schedule = rows.schedule, .microbatches = rows.microbatches, .recompute = rows.recomputes});
}

// One step of this rank's pipeline, and what comes of its own stages. The loss is that of all examples.
StepValues on_rank(const Rows& rows, const DeviceMesh& mesh, How how) {
  auto pipeline = make_pipeline(rows, mesh);
  const auto row = static_cast<std::size_t>(mesh.coordinate("data"));
  const auto own = static_cast<double>(rows.examples[row]), all = static_cast<double>(rows.all());
  const auto x = inputs(rows).narrow(0, rows.first(row), rows.examples[row]);
  const auto y = targets(rows).narrow(0, rows.first(row), rows.examples[row]);
  double loss = 0;
  if (how == How::mean) {
    loss = own / all * pipeline.step(x, y, [](const at::Tensor& output, const at::Tensor& target) {
      return sum_of_squares(output, target) / static_cast<double>(target.size(0));
    });
  } else if (how == How::forward_backward) {
    pipeline.forward_backward(
        x,
        [&](const at::Tensor& output, std::int64_t first, std::int64_t count) {
          const auto part = sum_of_squares(output, y.narrow(0, first, count));
          loss += part.item<double>() / all;
          return part / own;
        },
        rows.microbatches, own);
    mesh["pipeline"].sum({&loss, 1});
  } else {
    const double size = how == How::sum_by_own_weight ? own : all / static_cast<double>(rows.examples.size());
    loss = size / all * pipeline.step(x, y, sum_of_squares, [=](const at::Tensor&) { return size; });
  }
  const bool counts_alike = how == How::sum_by_weight_of_all;
  average_gradients(pipeline.parameters(), mesh["data"], counts_alike ? 1.0 : own);
  mesh["data"].sum({&loss, 1});
  StepValues values{{"loss", at::scalar_tensor(loss, at::kDouble)}};
  for (const auto& [stage, module] : pipeline.modules()) add_values(values, *module, std::to_string(stage) + ".");
  return values;
}

void expect_equal(const Rows& rows, How how) {
  const auto expected = in_one_process(rows);
  const int count = static_cast<int>(rows.examples.size());
  std::mutex mutex;
  StepValues all;
  collective::on_ranks(2 * count, [&](const Group& group) {
    const DeviceMesh mesh({{"data", count}, {"pipeline", 2}}, {group, 10});
    const auto found = on_rank(rows, mesh, how);
    const std::lock_guard lock(mutex);
    all.insert(found.begin(), found.end());
    for (const auto& [name, value] : found) {
      ASSERT_TRUE(expected.contains(name)) << name;
      EXPECT_LE((value - expected.at(name)).abs().max().item<double>(), 1e-12) << name;
    }
  });
  EXPECT_EQ(all.size(), expected.size());
}

TEST(MeshBatchNorm, PipelinesWithOtherNumbersOfExamplesComputeAsOneProcess) {
  for (const auto& rows : {Rows{{3, 2}, 2}, Rows{{4, 1}}, Rows{{2, 5}}, Rows{{2, 0}}, Rows{{0, 3}, 2}, Rows{{1, 1}, 4},
                           Rows{{4, 3}, 3, schedules::zero_bubble}, Rows{{1, 4}, 3, schedules::gpipe, true},
                           Rows{.examples = {3, 1}, .frozen_end = true},
                           Rows{.examples = {3, 1}, .recomputes = true, .frozen_end = true}, Rows{{1, 4, 2}, 3}}) {
    SCOPED_TRACE(testing::Message() << at::IntArrayRef(rows.examples) << " in " << rows.microbatches);
    expect_equal(rows, How::mean);
  }
  for (const auto how : {How::sum_by_own_weight, How::sum_by_weight_of_all, How::forward_backward})
    expect_equal({{4, 1}}, how);
}

// One pipeline may evaluate alone.
TEST(MeshBatchNorm, InEvalAPipelineIsCalledAlone) {
  const Rows rows{{2, 2}};
  collective::on_ranks(4, [&](const Group& group) {
    const DeviceMesh mesh({{"data", 2}, {"pipeline", 2}}, {group, 10});
    auto pipeline = make_pipeline(rows, mesh);
    pipeline.eval();
    if (mesh.coordinate("data") == 0) pipeline.forward(inputs(rows));
  });
}

std::vector<std::string> refusals(const std::function<void(const DeviceMesh&, const Group&)>& act) {
  std::vector<std::string> says;
  const auto errors = collective::run_ranks({.size = 4, .group = {.backend = "threads"}}, [&](const Group& group) {
    const DeviceMesh mesh({{"data", 2}, {"pipeline", 2}}, {group, 10});
    group.barrier(Deadline::after(std::chrono::seconds(10)));
    mesh.ranks().abort_on_error([&] { act(mesh, group); });
  });
  for (const auto& error : errors) {
    says.push_back(error == nullptr ? "" : message_of<Error>([&] { std::rethrow_exception(error); }));
  }
  return says;
}

TEST(MeshBatchNorm, WhatCannotBeRightIsRefused) {
  const Rows rows{{2, 1}};
  const auto no_weight = refusals([&](const DeviceMesh& mesh, const Group&) {
    auto pipeline = make_pipeline(rows, mesh);
    pipeline.forward_backward(inputs(rows), [](const at::Tensor& y, auto, auto) { return y.sum(); });
  });
  for (const auto& says : no_weight) expect_says(says, "give `weight`, such as the number of its examples");

  const auto other_weights = refusals([&](const DeviceMesh& mesh, const Group&) {
    auto pipeline = make_pipeline(rows, mesh);
    const auto row = static_cast<std::size_t>(mesh.coordinate("data"));
    const auto x = inputs(rows).narrow(0, rows.first(row), rows.examples[row]);
    pipeline.step(x, x, [](const at::Tensor& y, const at::Tensor& target) { return (y - target).pow(2).mean(); });
    average_gradients(pipeline.parameters(), mesh["data"]);
  });
  for (const auto& says : other_weights) expect_says(says, "the ranks count for other numbers than in the backward");

  const auto other_group = refusals([&](const DeviceMesh& mesh, const Group& group) {
    const auto data = group.split(mesh.coordinate("pipeline"), mesh.coordinate("data"), mesh.ranks().deadline());
    const auto stage = [&] {
      Normalized made(0.0);
      convert_sync_batchnorm(*made, *data);
      return made;
    };
    Pipeline pipeline({stage, stage}, mesh["pipeline"], {.microbatches = 2});
    pipeline.step(inputs(rows), targets(rows), sum_of_squares);
  });
  for (const auto& says : other_group)
    expect_says(says, "ranks (convert_sync_batchnorm) that are not of the pipeline's mesh");

  const auto in_fit = refusals([&](const DeviceMesh& mesh, const Group&) {
    const ModelParallelStrategy strategy(mesh, {.layers_of_stages = {1, 1}, .device = "cpu:0"});
    const auto scope = strategy.scope();
    const auto layer = [&] {
      Normalized made(0.0);
      convert_sync_batchnorm(*made, mesh["data"].group());
      return made;
    };
    Model model(std::vector<PipelineStage>{layer, layer});
    model.compile({.optimizer = SGD(), .loss = "mse"});
    model.fit(Dataset::from_tensor_slices(inputs(rows), targets(rows)).batch(2), {.verbose = 0});
  });
  for (const auto& says : in_fit) expect_says(says, "\"norm\" is over 2 ranks (convert_sync_batchnorm)");
}

}  // namespace
}  // namespace lockstep
