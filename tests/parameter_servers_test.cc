// Tests ParameterServerStrategy's promises: the processes of the job are threads that call each other over loopback.
#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "tests/server_job.h"

namespace lockstep {
namespace {

// All trainings begin with these weights.
std::string initial_weights(at::ScalarType dtype) {
  const auto path = testing::TempDir() + text("/parameter_servers_initial_", dtype);
  make_model(dtype, SGD()).save_weights(path);
  return path;
}

TEST(ParameterServers, SynchronousFitGivesTheWeightsOfMirrored) {
  const auto compare = [&](const Optimizer& optimizer, at::ScalarType dtype, int steps, double tolerance,
                           ServerJob job) {
    const auto initial = initial_weights(dtype);
    const auto data = make_data(dtype, true).shuffle(26, {.seed = 3}).batch(7).repeat();
    const auto train = [&](const Strategy& strategy) {
      const auto scope = strategy.scope();
      auto model = make_model(dtype, optimizer);
      model.load_weights(initial);
      const auto history = model.fit(data, {.epochs = 2, .verbose = 0, .steps_per_epoch = steps / 2});
      return std::pair(weights_of(model), history);
    };
    const auto [expected, expected_history] = train(MirroredStrategy(2));
    job.options.synchronous = true;
    expect_no_error(run_job(job, [&](const auto& strategy) {
      const auto [weights, history] = train(strategy);
      EXPECT_LE(largest_difference(weights, expected), tolerance) << strategy.task_type();
      ASSERT_EQ(history.epoch, expected_history.epoch) << strategy.task_type();
      for (const auto& [name, values] : expected_history.history) {
        for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(history[name][i], values[i], tolerance) << name;
      }
    }));
  };
  const auto momentum = SGD({.learning_rate = 0.05, .momentum = 0.9});
  const auto adam = Adam({.learning_rate = 0.01, .epsilon = 1e-2});
  compare(momentum, at::kDouble, 50, 1e-9, {});
  compare(adam, at::kDouble, 50, 1e-9, {.servers = 2, .options = {.variable_partitioner = FixedShardsPartitioner(2)}});
  compare(adam, at::kDouble, 50, 1e-9, {.workers = 3});
  compare(adam, at::kDouble, 50, 1e-9, {.servers = 3, .options = {.replicas_of_shards = 2}});
  compare(adam, at::kDouble, 50, 1e-9, {.options = {.devices = {"cpu:0", "cpu:1"}}});
  compare(adam, at::kFloat, 20, 1e-5, {});
  compare(adam, at::kFloat, 20, 1e-5, {.servers = 2, .options = {.variable_partitioner = FixedShardsPartitioner(2)}});
}

// Steps are numbered, so the sum of what they add is known whatever their order.
TEST(ParameterServers, AsynchronousFitAppliesEachStepOnce) {
  // The gradient of each batch's loss with respect to the bias is -x, so SGD adds up the rates times the x.
  const auto x = torch::arange(1, 41, torch::kDouble).view({40, 1});
  const auto data = Dataset::from_tensor_slices(x, torch::zeros({40, 1}, torch::kDouble)).batch(1);
  for (const auto& [workers, replicas] : {std::pair(1, 1), std::pair(3, 1), std::pair(2, 2)}) {
    ServerJob job{.workers = workers};
    for (int replica = 0; replica < replicas; ++replica) job.options.devices.push_back(text("cpu:", replica));
    expect_no_error(run_job(job, [&](const auto& strategy) {
      const auto scope = strategy.scope();
      Sequential model({Dense(1, {.kernel_initializer = "zeros"})});
      const auto loss = [](const Tensor&, const Tensor& out) { return -out; };
      model.compile({.optimizer = SGD({.learning_rate = 1}), .loss = Loss("minus", loss)});
      std::int64_t batches = 0;
      const auto count = LambdaCallback({.on_train_batch_end = [&](std::int64_t, const Logs&) { ++batches; }});
      model.fit(data, {.epochs = 3, .verbose = 0, .callbacks = {count}});
      EXPECT_EQ(batches, strategy.is_chief() ? 120 : 0);
      const auto weights = weights_of(model);
      EXPECT_EQ(weights[0].template item<double>(), 3 * 820.0);  // the kernel: each x once an epoch
      EXPECT_EQ(weights[1].template item<double>(), 120.0);      // the bias
      EXPECT_EQ(model.iterations(), strategy.is_chief() ? 120 : model.iterations());
    }));
  }
}

// One worker makes the steps of one device: so it has its running statistics too, and the chief evaluates with them.
TEST(ParameterServers, OneWorkerTrainsAndEvaluatesAsOneDevice) {
  const auto path = testing::TempDir() + "/parameter_servers_normalized";
  const auto make = [] {
    const auto torchs = ModuleLayer([] { return torch::nn::BatchNorm1d(9); });
    Sequential model({Dense(9), BatchNormalization(), Dense(9), torchs, Dense(3)});
    model.compile({.optimizer = Adam({.learning_rate = 0.01, .epsilon = 1e-2}),
                   .loss = SparseCategoricalCrossentropy({.from_logits = true}),
                   .metrics = {"accuracy"}});
    model.build({6}, at::kDouble);
    return model;
  };
  make().save_weights(path);
  const auto data = make_data(at::kDouble).shuffle(26, {.seed = 3}).batch(7), test = make_data(at::kDouble).batch(10);
  const auto train = [&](const Strategy& strategy) {
    const auto scope = strategy.scope();
    auto model = make();
    model.load_weights(path);
    const auto history = model.fit(data, {.epochs = 3, .verbose = 0, .validation_data = test});
    const auto logs = model.evaluate(test);
    const auto predicted = model.predict(test);
    return std::tuple(history["val_loss"], logs["loss"], logs["accuracy"], predicted);
  };
  const auto [val_loss, loss, accuracy, outputs] = train(OneDeviceStrategy("", 1));
  expect_no_error(run_job({.workers = 1}, [&](const auto& strategy) {
    const auto [own_val_loss, own_loss, own_accuracy, own_outputs] = train(strategy);
    for (std::size_t i = 0; i < val_loss.size(); ++i) EXPECT_NEAR(own_val_loss[i], val_loss[i], 1e-9);
    EXPECT_NEAR(own_loss, loss, 1e-9) << strategy.task_type();
    EXPECT_EQ(own_accuracy, accuracy) << strategy.task_type();
    EXPECT_LE((own_outputs - outputs).abs().max().template item<double>(), strategy.is_chief() ? 1e-9 : 1);
  }));
}

TEST(ParameterServers, AsynchronousLearnsWithSeveralWorkersAndServers) {
  const auto data = make_data(at::kFloat).shuffle(26, {.seed = 3}).batch(7);
  for (const int bound : {-1, 0, 2}) {
    ServerJob job{.workers = 3, .servers = 2};
    job.options.staleness_bound = bound;
    expect_no_error(run_job(job, [&](const auto& strategy) {
      const auto scope = strategy.scope();
      auto model = make_model(at::kFloat, Adam({.learning_rate = 0.05}));
      const auto history = model.fit(data, {.epochs = 40, .verbose = 0});
      EXPECT_LT(history["loss"].back(), 0.3 * history["loss"].front()) << strategy.task_type() << " " << bound;
      const auto& staleness = history["staleness"];  // of three workers
      EXPECT_EQ(staleness.size(), 40U);
      EXPECT_GT(*std::max_element(staleness.begin(), staleness.end()), 0);
    }));
  }
}

TEST(ParameterServers, CallbacksStopTheTrainingAndSetTheRate) {
  const auto data = make_data(at::kDouble).batch(7);  // 4 batches
  expect_no_error(run_job({}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, SGD({.learning_rate = 0.1}));
    const auto rate = LearningRateScheduler([](int epoch, double) { return epoch == 0 ? 0.1 : 0.0; });
    std::vector<Tensor> after_first;
    const auto keep = LambdaCallback({.on_epoch_end = [&](int epoch, const Logs&) {
      if (epoch == 0) after_first = weights_of(model);
      if (epoch == 2) model.stop_training();
    }});
    const auto history = model.fit(data, {.epochs = 9, .verbose = 0, .callbacks = {rate, keep}});
    EXPECT_EQ(history.epoch, (std::vector<int>{0, 1, 2}));
    if (strategy.is_chief()) {
      EXPECT_EQ(largest_difference(weights_of(model), after_first), 0);
    }
    // Data without a known length, and an end in the middle of an epoch.
    const auto endless = Dataset::from_generator(
        [&] { return [iterator = std::make_shared<DatasetIterator>(data.iterate())]() { return iterator->next(); }; });
    std::int64_t steps = 0;
    const auto count = LambdaCallback({.on_train_batch_end = [&](std::int64_t, const Logs&) { ++steps; }});
    model.fit(endless, {.epochs = 2, .verbose = 0, .callbacks = {count}});
    EXPECT_EQ(steps, strategy.is_chief() ? 8 : 0);
    const auto stop = LambdaCallback({.on_train_batch_end = [&](std::int64_t batch, const Logs&) {
      if (batch == 1) model.stop_training();
    }});
    const auto stopped = model.fit(data.repeat(100), {.epochs = 2, .verbose = 0, .callbacks = {stop}});
    EXPECT_EQ(stopped.epoch.size(), 1U);
  }));
}

TEST(ParameterServers, BestWeightsAreRestoredOnTheServersToo) {
  const auto data = make_data(at::kDouble).batch(7);
  expect_no_error(run_job({.workers = 1}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, SGD({.learning_rate = 0.01}));
    std::vector<Tensor> first;
    const auto worse = LearningRateScheduler([](int epoch, double) { return epoch == 0 ? 0.01 : 100.0; });
    const auto keep = LambdaCallback({.on_epoch_end = [&](int epoch, const Logs&) {
      if (epoch == 0) first = weights_of(model);
    }});
    const EarlyStopping stop({.monitor = "val_loss", .patience = 2, .restore_best_weights = true});
    model.fit(data, {.epochs = 5, .verbose = 0, .callbacks = {worse, keep, stop}, .validation_data = data});
    if (strategy.is_chief()) {
      EXPECT_EQ(largest_difference(weights_of(model), first), 0);
    }
  }));
}

TEST(ParameterServers, AFitAfterOneThatFailedMakesItsOwnSteps) {
  const auto data = make_data(at::kDouble).batch(7);
  expect_no_error(run_job({}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, SGD({.learning_rate = 0.1}));
    const auto fails = LambdaCallback({.on_train_batch_end = [](std::int64_t batch, const Logs&) {
      if (batch == 5) throw Error("the disk is full");
    }});
    EXPECT_THROW(model.fit(data.repeat(20), {.verbose = 0, .callbacks = {fails}}), Error);
    std::int64_t steps = 0;
    const auto count = LambdaCallback({.on_train_batch_end = [&](std::int64_t, const Logs&) { ++steps; }});
    const auto history = model.fit(data, {.epochs = 10, .verbose = 0, .callbacks = {count}});
    EXPECT_EQ(steps, strategy.is_chief() ? 40 : 0);
    EXPECT_LT(history["loss"].back(), history["loss"].front());
  }));
}

TEST(ParameterServers, WhatAWorkerOrTheChiefThrowsComesOutOfFitEverywhere) {
  const auto data = make_data(at::kFloat).batch(7);
  const auto in_all = [](const std::vector<std::string>& errors, const std::string& part) {
    EXPECT_EQ(errors.size(), 4U) << join(errors, "\n");
    for (const auto& error : errors) expect_says(error, part);
  };
  in_all(run_job({},
                 [&](const auto& strategy) {
                   const auto scope = strategy.scope();
                   auto model = make_model(at::kFloat, SGD());
                   model.fit(data, {.verbose = 0, .callbacks = {LambdaCallback({.on_epoch_end = [](int, const Logs&) {
                                                    throw Error("the disk is full");
                                                  }})}});
                 }),
         "the disk is full");
  const auto differ = run_job({.workers = 1}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kFloat, SGD());
    model.fit(strategy.task_type() == "worker" ? data.skip(1) : data, {.verbose = 0});
  });
  EXPECT_EQ(differ.size(), 3U);
  for (const auto& error : differ)
    expect_says(error,
                "the processes' fits differ: the chief has batches in the data set 4, and worker 0 has batches in the "
                "data set 3");
  const auto models = run_job({.workers = 1}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    Sequential model({Dense(strategy.task_type() == "worker" ? 4 : 3)});
    model.compile({.optimizer = SGD(), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
    model.fit(data, {.verbose = 0});
  });
  ASSERT_FALSE(models.empty());
  expect_says(join(models, "\n"), "the processes' models differ");
}

TEST(ParameterServers, ProcessesThatMakeDifferentCallsAreTold) {
  const auto data = make_data(at::kFloat).batch(7);
  using Act = std::function<void(const ParameterServerStrategy&, Sequential&)>;
  const auto run = [&](const Act& act) {
    return run_job({.options = {.reconnect_timeout_seconds = 300}}, [&](const auto& strategy) {
      const auto scope = strategy.scope();
      auto model = make_model(at::kFloat, SGD());
      act(strategy, model);
    });
  };
  const Act fit = [&](const auto&, auto& model) { model.fit(data, {.verbose = 0}); };
  const Act evaluate = [&](const auto&, auto& model) { model.evaluate(data, {.verbose = 0}); };
  const Act loop = [&](const auto& strategy, auto&) {
    ClusterCoordinator coordinator(strategy);
    coordinator.define("step", [](const auto&) { return std::vector<Tensor>(); });
    coordinator.run([&] {
      coordinator.schedule("step");
      coordinator.join();
    });
  };
  const auto expect_told = [&](const Act& chiefs, const Act& others, const std::string& what) {
    const auto errors = run([&](const auto& strategy, auto& model) {
      if (strategy.is_chief()) chiefs(strategy, model);
      others(strategy, model);
    });
    EXPECT_EQ(errors.size(), 4U) << join(errors, "\n");
    for (const auto& error : errors) expect_says(error, what);
  };
  expect_told(fit, evaluate, "number 0 is fit on the chief, and evaluate on another process");
  expect_told(loop, fit, "number 0 is ClusterCoordinator::run on the chief, and fit on another process");
  const auto ended = run([&](const auto& strategy, auto& model) {
    fit(strategy, model);
    if (!strategy.is_chief()) evaluate(strategy, model);
  });
  EXPECT_EQ(ended.size(), 3U) << join(ended, "\n");
  for (const auto& error : ended) expect_says(error, "its program has ended without the call of evaluate");
}

// A callback that ends the training as a failure would, in the middle of an epoch.
AnyCallback fails_at(std::int64_t batch, int epoch) {
  const auto now = std::make_shared<int>(0);
  return LambdaCallback({.on_epoch_begin = [=](int begun) { *now = begun; },
                         .on_train_batch_end =
                             [=](std::int64_t done, const Logs&) {
                               if (*now == epoch && done == batch) throw Error("the power went");
                             }});
}

// Each training begins with one kind of strategy, fails, and goes on with another one, as if it had not failed.
TEST(ParameterServers, ATrainingGoesOnFromAFullCheckpointOfAnyStrategy) {
  const auto initial = initial_weights(at::kDouble);
  const auto data = make_data(at::kDouble, true).shuffle(26, {.seed = 3}).batch(7);  // 4 batches
  const Adam adam({.learning_rate = 0.01, .epsilon = 1e-2});
  const auto train = [&](const Strategy& strategy, const std::vector<AnyCallback>& callbacks) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, adam);
    model.load_weights(initial);
    const auto history = model.fit(data, {.epochs = 3, .verbose = 0, .callbacks = callbacks});
    return std::pair(weights_of(model), history);
  };
  const auto [expected, expected_history] = train(MirroredStrategy(2), {});
  const ServerJob one{.options = {.synchronous = true}};
  const ServerJob two{
      .servers = 2,
      .options = {.variable_partitioner = FixedShardsPartitioner(2), .replicas_of_shards = 2, .synchronous = true}};
  const auto begin_with = [&](const ServerJob* job, const std::vector<AnyCallback>& callbacks) {
    if (job == nullptr) {
      EXPECT_THROW(train(MirroredStrategy(2), callbacks), Error);
    } else {
      run_job(*job, [&](const auto& strategy) { EXPECT_THROW(train(strategy, callbacks), Error); });
    }
  };
  const auto expect_whole = [&](const std::pair<std::vector<Tensor>, History>& trained) {
    EXPECT_LE(largest_difference(trained.first, expected), 1e-9);
    for (const auto& [name, values] : expected_history.history) {
      ASSERT_EQ(trained.second[name].size(), values.size()) << name;
      for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(trained.second[name][i], values[i], 1e-9) << name;
    }
  };
  int number = 0;
  for (const auto& [first, second] : std::vector<std::pair<const ServerJob*, const ServerJob*>>{
           {&one, &one}, {&one, &two}, {&two, nullptr}, {nullptr, &two}}) {
    const auto folder = fresh_folder("parameter_servers", text("backup ", number++)).string();
    const BackupAndRestore backup(folder, {.save_freq = 3});
    begin_with(first, {backup, fails_at(3, 1)});
    if (second == nullptr) {
      expect_whole(train(MirroredStrategy(2), {backup}));
    } else {
      expect_no_error(run_job(*second, [&](const auto& strategy) { expect_whole(train(strategy, {backup})); }));
    }
  }
}

// Steps that several workers have begun when a checkpoint is written are in it, and are not computed again.
TEST(ParameterServers, ACheckpointInAsynchronousStepsHasEachOnce) {
  const auto x = torch::arange(1, 41, torch::kDouble).view({40, 1});
  const auto data = Dataset::from_tensor_slices(x, torch::zeros({40, 1}, torch::kDouble)).batch(1);
  for (int round = 0; round < 3; ++round) {
    const auto folder = fresh_folder("parameter_servers", text("asynchronous ", round)).string();
    std::vector<Tensor> weights;
    const auto train = [&](const auto& strategy, const std::vector<AnyCallback>& callbacks) {
      const auto scope = strategy.scope();
      Sequential model({Dense(1, {.kernel_initializer = "zeros"})});
      const auto loss = [](const Tensor&, const Tensor& out) {
        std::this_thread::yield();
        return -out;
      };
      model.compile({.optimizer = SGD({.learning_rate = 1}), .loss = Loss("minus", loss)});
      model.fit(data, {.epochs = 3, .verbose = 0, .callbacks = callbacks});
      if (strategy.is_chief()) {
        weights = weights_of(model);
        EXPECT_EQ(model.iterations(), 120);
      }
    };
    const BackupAndRestore backup(folder, {.save_freq = 7});
    run_job({.workers = 3}, [&](const auto& strategy) {
      EXPECT_THROW(train(strategy, {backup, fails_at(11 + 7 * round, 1)}), Error);
    });
    expect_no_error(run_job({.workers = 2, .servers = 2}, [&](const auto& strategy) { train(strategy, {backup}); }));
    ASSERT_EQ(weights.size(), 2U);
    EXPECT_EQ(weights[0].item<double>(), 3 * 820.0);
    EXPECT_EQ(weights[1].item<double>(), 120.0);
  }
}

TEST(ParameterServers, WhatCannotBeIsNamed) {
  const auto says = [](const ParameterServerOptions& options, const std::string& part) {
    expect_says(message_of<Error>([&] { ParameterServerStrategy strategy(options); }), part);
  };
  says({}, "there is no worker in the cluster (this process is alone)");
  const Cluster four{.world = {.size = 4}, .store = "127.0.0.1:1", .source = "MPICH"};
  says({.num_ps = 1, .start_timeout_seconds = 0, .cluster = four}, "start_timeout_seconds is 0");
  says({.spare_workers = 1, .num_ps = 1, .cluster = four}, "spare_workers is 1; it must be 0 unless synchronous");
  says({.synchronous = true, .spare_workers = 2, .num_ps = 1, .cluster = four},
       "it must be from 0 to 1 with 2 workers");
  says({.synchronous = true, .staleness_bound = 2, .num_ps = 1, .cluster = four}, "staleness_bound is 2");
  says({.replicas_of_shards = 3, .num_ps = 1, .cluster = four}, "replicas_of_shards is 3; it must be 1 or 2");
  says({.replicas_of_shards = 2, .num_ps = 1, .cluster = four},
       "replicas_of_shards is 2; it must be 1 with one server");
  says({.gradient_dtype = DType::float16, .num_ps = 1, .cluster = four},
       "gradient_dtype is float16; it must be bfloat16");
  says({.staleness_bound = -2, .num_ps = 1, .cluster = four}, "staleness_bound is -2");
  const auto clipped = run_job({.workers = 1}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    make_model(at::kFloat, SGD({.learning_rate = 1, .clipnorm = 1}));
  });
  EXPECT_EQ(clipped.size(), 3U);
  for (const auto& error : clipped) expect_says(error, "only clipvalue is possible");
  const auto files = make_data(at::kFloat).batch(7).with_options({.auto_shard_policy = AutoShardPolicy::off});
  const auto errors = run_job({.workers = 1}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kFloat, SGD());
    model.fit(files, {.verbose = 0});
  });
  EXPECT_EQ(errors.size(), 3U);
  for (const auto& error : errors) expect_says(error, "auto_shard_policy must be");
}

}  // namespace
}  // namespace lockstep
