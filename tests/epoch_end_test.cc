// Callbacks see and save the weights of the epoch's end, with every strategy. The expected weights are those of a plain
// loop.
#include <ATen/ATen.h>

#include <atomic>

#include "base/fresh_folder_testing.h"
#include "data/stored_tensor.h"
#include "tests/server_job.h"

namespace lockstep {
namespace {

constexpr double kRate = 0.05;
constexpr int kEpochs = 3, kExamples = 23, kBatch = 5;

Tensor inputs() { return at::linspace(-1, 1, kExamples * 3, at::kDouble).sin().view({kExamples, 3}); }
Tensor targets() { return inputs().sum(1, true) * 2 + 1; }

// The weight and the bias of one linear layer.
using Line = std::vector<Tensor>;

Line line_in(const std::string& path) {
  const auto archive = read_archive(path);
  return {data::from_stored(archive.tensor("dense.weight")), data::from_stored(archive.tensor("dense.bias"))};
}

double loss_of(const Line& line) {
  return (at::linear(inputs(), line[0], line[1]) - targets()).square().mean().item<double>();
}

// Gradient descent as anybody writes it: [epoch], the line after it.
std::vector<Line> expected_lines(Line line) {
  std::vector<Line> lines;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    for (int begin = 0; begin < kExamples; begin += kBatch) {
      const auto x = inputs().slice(0, begin, begin + kBatch), y = targets().slice(0, begin, begin + kBatch);
      const auto error = (at::linear(x, line[0], line[1]) - y) * (2.0 / static_cast<double>(x.size(0)));
      line = {line[0] - kRate * error.t().matmul(x), line[1] - kRate * error.sum(0)};
    }
    lines.push_back(line);
  }
  return lines;
}

void expect_near(const Line& found, const Line& expected, const char* what, int epoch) {
  EXPECT_LT(largest_difference(found, expected), 1e-12) << what << ", epoch " << epoch + 1;
}

class Compare : public Callback {
 public:
  Compare(std::string folder, std::vector<Line> expected, Dataset data)
      : folder_(std::move(folder)), expected_(std::move(expected)), data_(std::move(data)) {}

  void on_epoch_end(int epoch, const Logs&) override {
    const auto& expected = expected_[static_cast<std::size_t>(epoch)];
    const auto path = text(folder_, "/by_callback_", epoch);
    model().save_weights(path);  // first: nothing else has read them before
    expect_near(line_in(path), expected, "save_weights", epoch);
    expect_near(weights_of(model()), expected, "module()", epoch);
    EXPECT_NEAR(model().evaluate(data_)["loss"], loss_of(expected), 1e-12);
    const auto outputs = model().predict(data_);
    EXPECT_LT((outputs - at::linear(inputs(), expected[0], expected[1])).abs().max().item<double>(), 1e-12);
    ++calls_;
  }
  int calls() const { return calls_; }

 private:
  std::string folder_;
  std::vector<Line> expected_;
  Dataset data_;
  int calls_ = 0;
};

// Runs in each process of the strategy.
void compare_epochs(const Strategy& strategy, const std::string& folder, const std::string& initial) {
  const auto scope = strategy.scope();
  const auto data = Dataset::from_tensor_slices(inputs(), targets()).batch(kBatch);
  const auto expected = expected_lines(line_in(initial));
  Sequential model({Dense(1)});
  model.compile({.optimizer = SGD({.learning_rate = kRate}), .loss = "mse"});
  model.build({3}, at::kDouble);
  model.load_weights(initial);
  const auto compare = std::make_shared<Compare>(folder, expected, data);
  model.fit(data, {.epochs = kEpochs,
                   .verbose = 0,
                   .callbacks = {ModelCheckpoint(folder + "/weights_{epoch}", {.save_weights_only = true}),
                                 ModelCheckpoint(folder + "/full_{epoch}"), compare}});
  if (strategy.is_chief()) {
    EXPECT_EQ(compare->calls(), kEpochs);
  }
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    const auto& line = expected[static_cast<std::size_t>(epoch)];
    if (strategy.is_chief()) expect_near(line_in(text(folder, "/weights_", epoch + 1)), line, "ModelCheckpoint", epoch);
    model.load_checkpoint(text(folder, "/full_", epoch + 1));
    if (strategy.is_chief()) expect_near(weights_of(model), line, "a full checkpoint", epoch);
  }
}

std::string initial_line(const std::string& folder) {
  set_random_seed(3);
  Sequential model({Dense(1)});
  model.build({3}, at::kDouble);
  model.save_weights(folder + "/initial");
  return folder + "/initial";
}

TEST(EpochEnd, WeightsAreThoseOfAPlainLoopInOneProcess) {
  const auto check = [](const std::string& name, const Strategy& strategy) {
    SCOPED_TRACE(name);
    const auto folder = fresh_folder("epoch_end", name).string();
    compare_epochs(strategy, folder, initial_line(folder));
  };
  check("one_device", OneDeviceStrategy("cpu:0"));
  check("mirrored", MirroredStrategy(3));
  check("hierarchical", MirroredStrategy({.devices = {"cpu:0", "cpu:1"},
                                          .cross_device_ops = CrossDeviceOps::hierarchical_copy_all_reduce}));
  check("reduction_to_one",
        MirroredStrategy({.devices = {"cpu:0", "cpu:1"}, .cross_device_ops = CrossDeviceOps::reduction_to_one_device}));
  check("central_storage", CentralStorageStrategy({.compute_devices = {"cpu:0", "cpu:1"}}));
}

TEST(EpochEnd, WeightsAreThoseOfAPlainLoopWithWorkers) {
  const auto check = [](const std::string& name, const WorkerOptions& options) {
    SCOPED_TRACE(name);
    const auto folder = fresh_folder("epoch_end", name).string();
    const auto initial = initial_line(folder);
    expect_no_errors(run_workers(options, [&](const auto& strategy) { compare_epochs(strategy, folder, initial); }));
  };
  check("workers", {.workers = 2, .replicas = 2});
  check("sharded_state", {.workers = 2, .shard_optimizer_state = true});
  check("elastic", {.workers = 2, .elastic = true});
}

TEST(EpochEnd, WeightsAreThoseOfAPlainLoopWithParameterServers) {
  const auto check = [](const std::string& name, ServerJob job) {
    SCOPED_TRACE(name);
    const auto folder = fresh_folder("epoch_end", name).string();
    const auto initial = initial_line(folder);
    expect_no_error(run_job(job, [&](const auto& strategy) { compare_epochs(strategy, folder, initial); }));
  };
  check("servers_synchronous", {.servers = 2, .options = {.synchronous = true}});
  check("servers_one_worker", {.workers = 1});
}

// Both parts of each step are made by the only worker that is there: it reads each batch once.
TEST(EpochEnd, AWorkerThatMakesTwoPartsReadsItsDataOnce) {
  std::atomic<int> reads = 0;
  const auto counted = [&](bool counts) {
    return Dataset::from_tensor_slices(inputs(), targets())
        .map([&reads, counts](Example example) {
          if (counts) ++reads;
          return example;
        })
        .batch(1);
  };
  std::atomic<bool> trained = false;
  expect_no_error(run_job({.options = {.synchronous = true}}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    const bool late = strategy.task_type() == "worker" && strategy.task_index() == 1;
    while (late && !trained) std::this_thread::yield();
    Sequential model({Dense(1)});
    model.compile({.optimizer = SGD({.learning_rate = kRate}), .loss = "mse"});
    model.build({3}, at::kDouble);
    const LambdaCallback last({.on_epoch_end = [&](int, const Logs&) { trained = true; }});
    model.fit(counted(strategy.task_type() == "worker" && !late), {.verbose = 0, .callbacks = {last}});
  }));
  EXPECT_LE(reads, kExamples + 2);  // and what was read ahead
}

// A frozen layer and running statistics are not on servers.
TEST(EpochEnd, WhatACallbackLoadsReachesTheWorkersOfServers) {
  const auto folder = fresh_folder("epoch_end", "callback_loads").string();
  const auto data = Dataset::from_tensor_slices(inputs(), targets()).batch(kBatch);
  const auto make = [] {
    Sequential model({Dense(3), BatchNormalization(), Dense(1)});
    model.compile({.optimizer = SGD({.learning_rate = kRate}), .loss = "mse"});
    model.build({3}, at::kDouble);
    return model;
  };
  for (const char* const name : {"/before", "/loaded"}) {
    const auto scope = OneDeviceStrategy("cpu:0", 1).scope();
    auto model = make();
    model.fit(data, {.verbose = 0});
    model.save_weights(folder + name);
  }
  const auto train = [&](const Strategy& strategy, const std::string& result) {
    const auto scope = strategy.scope();
    auto model = make();
    model.load_weights(folder + "/before");
    model.module<torch::nn::Module>()->named_parameters()["dense.weight"].set_requires_grad(false);
    const LambdaCallback loads({.on_epoch_end = [&](int epoch, const Logs&) {
      if (epoch == 0) model.load_weights(folder + "/loaded");
    }});
    model.fit(data, {.epochs = 2, .verbose = 0, .callbacks = {loads}});
    model.save_weights(result);
  };
  train(OneDeviceStrategy("cpu:0", 1), folder + "/one_process");
  expect_no_error(run_job({.workers = 1}, [&](const auto& strategy) { train(strategy, folder + "/servers"); }));
  const auto expected = read_archive(folder + "/one_process"), found = read_archive(folder + "/servers");
  for (const auto& [name, stored] : expected.tensors) {
    const auto difference = data::from_stored(found.tensor(name)) - data::from_stored(stored);
    EXPECT_LT(difference.abs().max().item<double>(), 1e-12) << name;
  }
}

}  // namespace
}  // namespace lockstep
