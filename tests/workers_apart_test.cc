// Workers that train by themselves and meet seldom (DiLoCo), in fit: against a plain loop over as many models.
#include <torch/nn/modules/linear.h>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "lockstep/train/saving_callbacks.h"
#include "tests/plain_groups.h"
#include "tests/workers.h"

namespace lockstep {
namespace {

constexpr int kEpochsApart = 3;

TEST(WorkersApart, FitIsAPlainLoopOverGroups) {
  const auto initial = saved_initial("workers_apart");
  const std::vector<DiLoCoOptions> kinds{local_sgd(3), {.steps = 2}, {.steps = 50}};
  for (const auto& options : kinds) {
    for (const auto& [workers, per_group, replicas, elastic] :
         {std::tuple(2, 1, 1, false), std::tuple(2, 1, 2, false), std::tuple(4, 2, 1, false),
          std::tuple(4, 1, 1, false), std::tuple(4, 4, 1, false), std::tuple(3, 1, 1, true),
          std::tuple(2, 1, 2, true)}) {
      SCOPED_TRACE(text(workers, " workers in groups of ", per_group, ", ", replicas, " replicas, ", options.steps,
                        elastic ? " elastic" : ""));
      PlainGroups plain(workers / per_group, workers, options, initial);
      for (int epoch = 0; epoch < kEpochsApart; ++epoch) plain.train_epoch();
      const auto train = [&](const MultiWorkerMirroredStrategy& strategy) {
        const auto scope = strategy.scope();
        auto model = make_model(at::kDouble, adam_of_groups());
        model.load_weights(initial);
        model.fit(examples_of_all(), {.epochs = kEpochsApart, .verbose = 0});
        for (int replica = 0; replica < replicas; ++replica)
          EXPECT_LT(largest_difference(weights_of(model, replica), plain.values()), 1e-9);
      };
      expect_no_errors(run_workers({.workers = workers,
                                    .replicas = replicas,
                                    .elastic = elastic,
                                    .diloco = options,
                                    .workers_per_group = per_group},
                                   train));
    }
  }
}

// With each worker's own state of Adam, the outer momentum, and what rounding to 8 bits has lost.
TEST(WorkersApart, ARestoredFitHasTheSameBits) {
  for (const bool background : {false, true}) {
    const auto folder = fresh_folder("workers_apart", "restored");
    Collected<std::vector<Tensor>> whole, restored;
    const auto fit = [&](const MultiWorkerMirroredStrategy& strategy, bool again) {
      const auto scope = strategy.scope();
      set_random_seed(5);
      auto model = make_model(at::kFloat, adam_of_groups());
      if (again) model.load_checkpoint((folder / "full_2").string());
      const auto to_float = [](Example example) {
        example.x = example.x.to(at::kFloat);
        return example;
      };
      model.fit(examples_of_all().map(to_float),
                {.epochs = 4,
                 .verbose = 0,
                 .callbacks = {ModelCheckpoint((folder / "full_{epoch}").string(), {.background = background})},
                 .initial_epoch = again ? 2 : 0});
      (again ? restored : whole).add(strategy, weights_of(model));
    };
    const WorkerOptions options{.workers = 3, .diloco = DiLoCoOptions{.steps = 3, .dtype = DType::int8}};
    expect_no_errors(run_workers(options, [&](const auto& strategy) { fit(strategy, false); }));
    expect_no_errors(run_workers(options, [&](const auto& strategy) { fit(strategy, true); }));
    for (int worker = 0; worker < 3; ++worker) {
      EXPECT_TRUE(equal_bits(restored.values().at(worker), whole.values().at(worker)));
      EXPECT_TRUE(equal_bits(whole.values().at(worker), whole.chiefs()));
    }
  }
}

TEST(WorkersApart, SavingBetweenMeetingsIsRefusedOnAllWorkers) {
  const auto folder = fresh_folder("workers_apart", "between");
  const auto errors = run_workers({.workers = 2, .diloco = DiLoCoOptions{.steps = 3}}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, adam_of_groups());
    model.fit(examples_of_all(),
              {.verbose = 0, .callbacks = {ModelCheckpoint((folder / "{batch}").string(), {.save_freq = 2})}});
  });
  for (const auto& error : errors) expect_says(error, "the next meeting is in 1 steps; meet()");
}

// Values that all workers load between two meetings are those from which they go on.
TEST(WorkersApart, LoadedWeightsAreKept) {
  const auto initial = saved_initial("workers_apart");
  expect_no_errors(run_workers({.workers = 2, .diloco = DiLoCoOptions{.steps = 4}}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, adam_of_groups());
    auto batches = examples_of_all().iterate();
    for (int step = 0; step < 3; ++step) model.train_on_batch(*batches.next());
    model.load_weights(initial);
    const auto loaded = weights_of(model);
    model.set_learning_rate(0);
    model.train_on_batch(*batches.next());                           // meets
    EXPECT_LT(largest_difference(weights_of(model), loaded), 1e-2);  // the momentum alone
    model.save_weights((fresh_folder("workers_apart", text("kept", strategy.worker_rank())) / "weights").string());
  }));
}

TEST(WorkersApart, ModelsAndDataThatDifferAreRefused) {
  const WorkerOptions apart{.workers = 2, .diloco = DiLoCoOptions{.steps = 4}};
  for (const auto& error : run_workers(apart, [](const auto& strategy) {
         strategy.replicate([&] { return torch::nn::Linear(3, 2 + strategy.worker_rank()); });
       })) {
    expect_says(error, "models differ");
  }
  const auto train = [](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, adam_of_groups());
    const auto other = [by = strategy.worker_rank()](Example example) {
      if (example.x.size(0) < kBatchOfAll) example.x = example.x + by;  // the last batch
      return example;
    };
    model.fit(examples_of_all().map(other), {.epochs = 2, .verbose = 0});
  };
  for (const auto& error : run_workers(apart, train, /*compare_copies_every=*/2)) EXPECT_NE(error, "");
}

TEST(WorkersApart, WhatNeedsEqualValuesIsRefusedBetweenMeetings) {
  const auto errors = run_workers({.workers = 2, .diloco = DiLoCoOptions{.steps = 3}}, [](const auto& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, adam_of_groups());
    model.train_on_batch(*examples_of_all().iterate().next());
    expect_says(message_of<InvalidArgument>([&] { model.predict(examples_of_all()); }), "differ from rank to rank");
    model.optimizer().meet();
    model.evaluate(examples_of_all());
    model.train_on_batch(*examples_of_all().iterate().next());
    model.evaluate(examples_of_all());
  });
  for (const auto& error : errors) expect_says(error, "differ from rank to rank");
}

TEST(WorkersApart, FrozenParametersStay) {
  expect_no_errors(run_workers({.workers = 2, .diloco = DiLoCoOptions{.steps = 2}}, [](const auto& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, adam_of_groups());
    model.fit(examples_of_all(), {.verbose = 0});
    auto module = model.template module<torch::nn::Module>();
    module->parameters()[0].set_requires_grad(false);
    const auto before = weights_of(model);
    model.fit(examples_of_all(), {.verbose = 0});
    EXPECT_TRUE(at::equal(weights_of(model)[0], before[0]));
    EXPECT_FALSE(at::equal(weights_of(model)[1], before[1]));
  }));
}

// Another worker waits in a meeting, or in its group's exchange.
TEST(WorkersApart, AWorkerThatFailsIsHeardAtOnce) {
  for (const int per_group : {1, 2}) {
    const auto start = std::chrono::steady_clock::now();
    const auto errors = run_workers({.workers = 4, .diloco = DiLoCoOptions{.steps = 2}, .workers_per_group = per_group},
                                    [](const auto& strategy) {
                                      const auto scope = strategy.scope();
                                      auto model = make_model(at::kDouble, adam_of_groups());
                                      for (int step = 0; step < 4; ++step) {
                                        if (step == 3 && strategy.worker_rank() == 1)
                                          throw InvalidArgument("as asked for");
                                        model.train_on_batch(*examples_of_all().iterate().next());
                                      }
                                    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
    for (const auto& error : errors) EXPECT_NE(error, "");
  }
}

TEST(WorkersApart, BackupsBetweenEpochs) {
  const auto folder = fresh_folder("workers_apart", "backups");
  expect_no_errors(run_workers({.workers = 2, .diloco = DiLoCoOptions{.steps = 2}}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, adam_of_groups());
    model.fit(examples_of_all().take(3),
              {.epochs = 4,
               .verbose = 0,
               .callbacks = {
                   BackupAndRestore((folder / std::to_string(strategy.worker_rank())).string(), {.save_freq = 2})}});
  }));
}

// The outer step is not left out where a worker is alone.
TEST(WorkersApart, OneWorkerMakesTheOuterStepToo) {
  std::vector<Tensor> one, two;
  const auto initial = saved_initial("workers_apart");
  for (const int workers : {1, 2}) {
    expect_no_errors(run_workers({.workers = workers, .diloco = DiLoCoOptions{.steps = 2}}, [&](const auto& strategy) {
      const auto scope = strategy.scope();
      auto model = make_model(at::kDouble, adam_of_groups());
      model.load_weights(initial);
      for (int step = 0; step < 4; ++step) {
        const auto x = at::arange(12, at::kDouble).view({2, 6}).sin(), y = at::ones({2}, at::kLong);
        model.train_on_batch({at::cat(std::vector(static_cast<std::size_t>(workers), x)),
                              at::cat(std::vector(static_cast<std::size_t>(workers), y))});
      }
      if (strategy.is_chief()) (workers == 1 ? one : two) = weights_of(model);
    }));
  }
  EXPECT_LT(largest_difference(one, two), 1e-9);
}

TEST(WorkersApart, AnEarlierOptimizerOfTheModelIsRefused) {
  const auto errors = run_workers({.workers = 2, .diloco = DiLoCoOptions{.steps = 4}}, [](const auto& strategy) {
    auto net = strategy.replicate([] { return torch::nn::Linear(3, 1); });
    const auto first = strategy.optimizer(adam_of_groups(), net), second = strategy.optimizer(adam_of_groups(), net);
    for (const auto& optimizer : {second, first}) {
      strategy.run(
          [&](ReplicaContext& replica, torch::nn::Linear& own) {
            optimizer.minimize(replica, own(at::ones({2, 3}, own->weight.device())).sum(), 2);
          },
          net);
    }
  });
  for (const auto& error : errors) expect_says(error, "another optimizer was made for this model later");
}

TEST(WorkersApart, OptionsThatDoNotGoTogetherAreRefused) {
  const auto says = [](const WorkerOptions& options) { return run_workers(options, [](const auto&) {})[0]; };
  const auto diloco = DiLoCoOptions{.steps = 4};
  expect_says(says({.workers = 3, .diloco = diloco, .workers_per_group = 2}), "3 workers cannot be divided");
  expect_says(says({.workers_per_group = 2}), "workers_per_group is for `diloco`");
  expect_says(says({.workers = 4, .elastic = true, .diloco = diloco, .workers_per_group = 2}),
              "workers_per_group is 2; with `diloco` and `elastic` it must be 1");
  expect_says(says({.elastic = true, .diloco = DiLoCoOptions{.steps = 4, .parts = 2}}),
              "diloco->parts is 2; with `diloco` and `elastic` it must be 1");
  expect_says(says({.elastic = true, .diloco = DiLoCoOptions{.steps = 4, .overlap = 1}}),
              "diloco->overlap is 1; with `diloco` and `elastic` it must be 0");
  expect_says(
      message_of<InvalidArgument>([&] {
        MultiWorkerMirroredStrategy({.elastic = ElasticOptions{.worker_batch = WorkerBatch()}, .diloco = diloco});
      }),
      "`diloco` is not for elastic.worker_batch");
  expect_says(says({.shard_optimizer_state = true, .diloco = diloco}), "`diloco` is not for shard_optimizer_state");
  expect_says(says({.diloco = DiLoCoOptions{.steps = 0}}), "DiLoCo: steps is 0");
  expect_says(says({.communication = {.gradient_dtype = DType::int8}, .diloco = diloco}), "workers send no gradients");
  expect_says(says({.replace_differing_copies = true, .diloco = diloco}), "not for replace_differing_copies");
  expect_says(
      says({.replicas = 2, .communication = {.implementation = CommunicationImplementation::nccl}, .diloco = diloco}),
      "implementation nccl is for gradients on GPUs");
  const auto with_loss_scale = [](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    make_model(at::kFloat, LossScaleOptimizer(adam_of_groups()));
  };
  expect_says(run_workers({.diloco = diloco}, with_loss_scale)[0], "not for a LossScaleOptimizer");
}

}  // namespace
}  // namespace lockstep
