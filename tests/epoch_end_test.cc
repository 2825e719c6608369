// Callbacks see and save the weights of the epoch's end, with every strategy. The expected weights are those of a plain
// loop.
#include <atomic>

#include "base/fresh_folder_testing.h"
#include "tests/epoch_end.h"
#include "tests/server_job.h"

namespace lockstep {
namespace {

using namespace epoch_end;

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
