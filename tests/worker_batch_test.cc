// Trainings of several workers, through `lockstep run`, in which the batch of a worker stays the same when others are
// lost or come (WorkerBatch), against a loop of LibTorch's.
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <string>

#include "base/text.h"
#include "lockstep/data/dataset.h"
#include "tests/elastic_job.h"

namespace lockstep {
namespace {

constexpr int kEpochs = 3, kBatches = 20;

struct Outcome {
  int steps = 0;
  std::vector<double> numbers;  // as elastic_fit_program prints its weights
};

// The model of elastic_fit_program, whose steps use `before` batches each, and from `change` on `after`; the rate is
// meant for two workers.
template <class Scaling>
Outcome train(int before, int change, int after, const Scaling& scaling) {
  const auto x = at::sin(at::arange(240 * 6, at::kDouble)).view({240, 6});
  const auto y = x.cumsum(1).slice(1, 2, 5);
  const auto data = Dataset::from_tensor_slices(x, y).shuffle(240, {.seed = 3}).batch(12);
  auto one = torch::nn::Linear(6, 8), other = torch::nn::Linear(8, 3);
  std::vector<at::Tensor> parameters;
  for (auto layer : {one, other}) {
    layer->to(at::kDouble);
    const at::NoGradGuard no_grad;
    layer->weight.fill_(1);
    layer->bias.fill_(0);
    parameters.insert(parameters.end(), {layer->weight, layer->bias});
  }
  Outcome outcome;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    auto batches = data.iterate({.epoch = epoch});
    for (int used = 0; used < kBatches;) {
      const int workers = outcome.steps < change ? before : after;
      std::vector<at::Tensor> xs, ys;
      for (int w = 0; w < workers && used < kBatches; ++w, ++used) {
        const auto batch = batches.next().value();
        xs.push_back(batch.x);
        ys.push_back(batch.y);
      }
      const auto loss = (other(at::tanh(one(at::cat(xs)))) - at::cat(ys)).square().mean();
      for (auto& parameter : parameters) parameter.mutable_grad() = at::Tensor();
      loss.backward();
      const at::NoGradGuard no_grad;
      for (auto& parameter : parameters) parameter.sub_(parameter.grad() * (0.01 * scaling(workers / 2.0)));
      ++outcome.steps;
    }
  }
  for (const auto& parameter : parameters) {
    outcome.numbers.push_back(parameter.sum().item<double>());
    outcome.numbers.push_back(parameter.square().sum().item<double>());
  }
  return outcome;
}

Process run(const std::vector<std::string>& more, int workers, int restarts = 0) {
  std::vector<std::string> variables{"WORKER_BATCH=2"};
  variables.insert(variables.end(), more.begin(), more.end());
  return elastic_job(ELASTIC_PROGRAM, variables, workers, 1, restarts);
}

void expect_trained(Process& job, std::size_t workers, const Outcome& expected) {
  const auto& output = job.wait_for_end(60);
  const auto got = numbers_after(output, text("steps ", expected.steps, ", weights"));
  EXPECT_EQ(got.size(), workers) << output;
  for (const auto& one : got) EXPECT_LE(difference(one, expected.numbers), 1e-9) << output;
}

TEST(WorkerBatches, EachWorkerUsesABatchOfItsOwnInEachStep) {
  for (const int workers : {1, 2, 3}) {
    SCOPED_TRACE(workers);
    auto job = run({}, workers);
    expect_trained(job, static_cast<std::size_t>(workers), train(workers, 0, workers, [](double r) { return r; }));
  }
}

TEST(WorkerBatches, TheRateFollowsTheNumberOfWorkersByTheRule) {
  const auto linear = [](double ratio) { return ratio; };
  const auto square_root = [](double ratio) { return std::sqrt(ratio); };
  for (const int victim : {0, 1}) {
    SCOPED_TRACE(victim);
    auto by_ratio = run({text("VICTIM=", victim), "STEP=3", "PLACE=forward"}, 3);
    expect_trained(by_ratio, 2, train(3, 3, 2, linear));
    auto by_root = run({text("VICTIM=", victim), "STEP=3", "PLACE=forward", "SCALING=sqrt"}, 3);
    expect_trained(by_root, 2, train(3, 3, 2, square_root));
  }
}

TEST(WorkerBatches, ANewcomerJoinsAndAllHaveTheSame) {
  auto job = run({"VICTIM=1", "STEP=3", "PLACE=forward", "STEP_MS=60"}, 3, 1);
  const auto& output = job.wait_for_end(60);
  EXPECT_NE(output.find("joined at step"), std::string::npos) << output;
  const auto got = numbers_after(output, ", weights");
  ASSERT_EQ(got.size(), 3U) << output;
  for (const auto& one : got) EXPECT_EQ(one, got[0]) << output;
}

}  // namespace
}  // namespace lockstep
