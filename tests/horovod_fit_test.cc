// Horovod's optimizer and callbacks under fit, against one process on all ranks' examples. Ranks are threads.
#include <gtest/gtest.h>
#include <lockstep/estimator.h>
#include <lockstep/horovod.h>
#include <lockstep/lockstep.h>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "collective/on_ranks_testing.h"
#include "front_ends/horovod/ranks_testing.h"
#include "tests/workers.h"
#include "train/model_impl.h"

namespace lockstep {
namespace {

namespace hvd = horovod;

// Runs ranks, each with a strategy of its own.
void on_ranks(int size, const std::function<void(int)>& body) {
  hvd::on_ranks(size, [&](int rank) {
    const auto scope = OneDeviceStrategy("cpu:0", 1).scope();
    body(rank);
  });
}

Optimizer adam() { return Adam({.learning_rate = 0.05}); }

// Rank r of n reads every n-th example of batches of 7, so that batches are those of one process.
Dataset data_of(int rank, int size) {
  static const auto data = make_data(at::kDouble);  // drawn once, from the generator that all threads share
  return data.batch(7).map([rank, size](Example batch) {
    batch.x = batch.x.slice(0, rank, {}, size);
    batch.y = batch.y.slice(0, rank, {}, size);
    return batch;
  });
}

// The program's seeds are all threads', so that initial values come from a file.
std::vector<Tensor> alone(int epochs, const Optimizer& optimizer, const std::string& initial) {
  const auto scope = OneDeviceStrategy("cpu:0", 1).scope();
  auto model = make_model(at::kDouble, optimizer);
  if (std::filesystem::exists(checkpoint_file(initial))) {
    model.load_weights(initial);
  } else {
    model.save_weights(initial);
  }
  model.fit(data_of(0, 1), {.epochs = epochs, .verbose = 0});
  return weights_of(model);
}

TEST(HorovodFit, RanksTogetherAreOneProcessOnAllExamples) {
  const auto initial = (fresh_folder("horovod_fit", "together") / "initial").string();
  const auto expected = alone(13, adam(), initial);  // 52 steps, of which 13 are ragged
  const auto summed = alone(3, SGD({.learning_rate = 0.3}), initial);
  for (const int ranks : {1, 2, 3}) {
    on_ranks(ranks, [&](int rank) {
      auto model = make_model(at::kDouble, hvd::DistributedOptimizer(adam()));
      model.load_weights(initial);
      model.fit(data_of(rank, ranks), {.epochs = 13, .verbose = 0});
      EXPECT_LE(largest_difference(weights_of(model), expected), 1e-9);

      auto other =
          make_model(at::kDouble, hvd::DistributedOptimizer(SGD({.learning_rate = 0.3 / ranks}), {.op = hvd::Sum}));
      other.load_weights(initial);
      other.fit(data_of(rank, ranks), {.epochs = 3, .verbose = 0});
      EXPECT_LE(largest_difference(weights_of(other), summed), 1e-9);
    });
  }
}

// An optimizer without Horovod: each process gives all the data, and trains on its part of every batch.
Optimizer with_ranks(const Group& group) {
  auto options = adam().options();
  options.gradient_ranks = GradientRanks{.ranks = group, .own_data = false};
  return {adam().shared_rule(), options};
}

TEST(RanksOfAnOptimizer, DivideTheSameData) {
  const auto initial = (fresh_folder("horovod_fit", "divided") / "initial").string();
  const auto data = data_of(0, 1).shuffle(20, {.seed = 3});
  const auto train = [&](const Optimizer& optimizer) {
    auto model = make_model(at::kDouble, optimizer);
    model.load_weights(initial);
    model.fit(data, {.epochs = 6, .verbose = 0});
    auto batches = data.iterate();
    for (int i = 0; i < 3; ++i) model.train_on_batch(*batches.next());
    return weights_of(model);
  };
  alone(1, adam(), initial);
  std::vector<Tensor> expected;
  {
    const auto scope = OneDeviceStrategy("cpu:0", 1).scope();
    expected = train(adam());
  }
  for (const auto& devices : {std::vector<std::string>{"cpu:0"}, {"cpu:0", "cpu:1"}}) {
    for (const int ranks : {2, 3}) {
      collective::on_ranks(ranks, [&](const Group& group) {
        const auto scope = MirroredStrategy({.devices = devices}).scope();
        EXPECT_LE(largest_difference(train(with_ranks(group)), expected), 1e-9);
      });
    }
  }
}

// Before a rank has a model, it waits for the others' models.
TEST(RanksOfAnOptimizer, AreToldWhereOneCannotBegin) {
  std::vector<std::string> said(2);
  collective::on_ranks(2, [&](const Group& group) {
    const auto scope = OneDeviceStrategy("cpu:0", 1).scope();
    const auto make = [&] {
      Sequential model({Dense(3, {.kernel_initializer = "zeros"})});
      model.compile({.optimizer = with_ranks(group), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
      return model;
    };
    auto model = make();
    const auto rank = static_cast<std::size_t>(group.rank());
    said[rank] = message_of<InvalidArgument>(
        [&] { model.fit(data_of(0, 1), {.epochs = group.rank() == 1 ? 0 : 1, .verbose = 0}); });
    model.fit(data_of(0, 1), {.verbose = 0});  // the Group works as before
    auto other = make();
    const auto none = message_of<Error>(
        [&] { other.fit(group.rank() == 1 ? data_of(0, 1).take(0) : data_of(0, 1), {.verbose = 0}); });
    expect_says(none, "fit: the data set is empty");
  });
  expect_says(said[0], "rank 1: fit: epochs is 0");
  expect_says(said[1], "fit: epochs is 0");
}

TEST(RanksOfAnOptimizer, BeginWithTheSameParameters) {
  std::vector<std::string> said(2);
  collective::on_ranks(2, [&](const Group& group) {
    const auto scope = OneDeviceStrategy("cpu:0", 1).scope();
    auto model = make_model(at::kDouble, with_ranks(group));
    if (group.rank() == 1) {
      const at::NoGradGuard no_gradient;
      unwrap(model.module()).parameter(0, 0).add_(1);
    }
    said[static_cast<std::size_t>(group.rank())] =
        message_of<InvalidArgument>([&] { model.fit(data_of(0, 1), {.verbose = 0}); });
  });
  for (const auto& one : said) expect_says(one, "differ");
}

// Horovod's ranks have data of their own. Each begins with what it has, as its documents' programs do before a
// broadcast.
TEST(HorovodFit, RanksThatBeginApartAreRefused) {
  const auto folder = fresh_folder("horovod_fit", "apart").string();
  alone(2, adam(), folder + "/initial");
  {
    const auto scope = OneDeviceStrategy("cpu:0", 1).scope();
    auto model = make_model(at::kDouble, adam());
    model.load_weights(folder + "/initial");
    model.fit(data_of(0, 1), {.verbose = 0});
    model.save_checkpoint(folder + "/trained");
  }
  on_ranks(2, [&](int rank) {
    const auto said = [&](const std::function<void(Model&)>& begin) {
      auto model = make_model(at::kDouble, hvd::DistributedOptimizer(adam()));
      model.load_weights(folder + "/initial");
      begin(model);
      return message_of<InvalidArgument>([&] { model.fit(data_of(rank, 2), {.verbose = 0}); });
    };
    const auto only_root = [&](Model& model) {
      if (rank == 0) model.load_checkpoint(folder + "/trained");
    };
    const auto only_root_its_steps = [&](Model& model) {
      rank == 0 ? model.load_checkpoint(folder + "/trained") : model.load_weights(folder + "/trained");
    };
    expect_says(said(only_root), "first weights (give all those of one, by BroadcastGlobalVariablesCallback");
    expect_says(said(only_root_its_steps), "starting points (broadcast what one restored");
    expect_says(said([](Model&) {}), "nothing was thrown");
  });
}

TEST(HorovodFit, BroadcastGivesAllWhatRootRestored) {
  const auto folder = fresh_folder("horovod_fit", "broadcast").string();
  on_ranks(2, [&](int rank) {
    // Rank 0 alone backs up and restores. Returns the weights, and the steps made here.
    const auto train = [&](bool breaks) {
      auto model = make_model(at::kDouble, hvd::DistributedOptimizer(adam()));
      if (rank == 0 && std::filesystem::exists(checkpoint_file(folder + "/initial"))) {
        model.load_weights(folder + "/initial");
      } else if (rank == 0) {
        model.save_weights(folder + "/initial");
      }
      std::vector<AnyCallback> callbacks{hvd::BroadcastGlobalVariablesCallback(0)};
      if (rank == 0) callbacks.push_back(BackupAndRestore(folder, {.save_freq = 1, .delete_checkpoint = false}));
      int steps = 0;
      callbacks.push_back(LambdaCallback({.on_train_batch_begin = [&](std::int64_t) {
        if (breaks && steps == 6) throw Error("broken off");
        ++steps;
      }}));
      const auto fit = [&] {
        model.fit(data_of(rank, 2).shuffle(4, {.seed = 5}), {.epochs = 3, .verbose = 0, .callbacks = callbacks});
      };
      if (breaks) {
        EXPECT_THROW(fit(), Error);
      } else {
        fit();
      }
      return std::pair(weights_of(model), steps);
    };
    const auto [whole, all_steps] = train(false);
    EXPECT_EQ(all_steps, 12);
    hvd::barrier();
    if (rank == 0) std::filesystem::remove(checkpoint_file(folder + "/backup"));
    hvd::barrier();
    train(true);
    hvd::barrier();
    const auto [resumed, steps_left] = train(false);
    EXPECT_TRUE(steps_left == 6 || steps_left == 7) << steps_left;  // a rank that breaks off may cost another its step
    EXPECT_TRUE(equal_bits(resumed, whole));
  });
}

TEST(HorovodFit, MetricsAreAveragedForHistoryAndCallbacks) {
  on_ranks(2, [](int rank) {
    auto model = make_model(at::kDouble, hvd::DistributedOptimizer(adam()));
    double seen = 0;
    const auto history = model.fit(
        data_of(rank, 2),
        {.verbose = 0,
         .callbacks = {hvd::BroadcastGlobalVariablesCallback(),
                       LambdaCallback({.on_epoch_end = [&](int, const Logs& logs) { seen = logs["accuracy"]; }}),
                       hvd::MetricAverageCallback()}});
    const auto all = hvd::allgather(at::full({1}, history["accuracy"][0], at::kDouble));
    EXPECT_EQ(all[0].item<double>(), all[1].item<double>());
    EXPECT_EQ(seen, history["accuracy"][0]);
  });
}

TEST(HorovodFit, WarmupGoesToTheRateInEqualSteps) {
  on_ranks(4, [](int rank) {
    auto model = make_model(at::kDouble, hvd::DistributedOptimizer(SGD({.learning_rate = 0.25})));
    std::vector<double> rates;
    model.fit(data_of(rank, 4), {.epochs = 3,
                                 .verbose = 0,
                                 .callbacks = {hvd::BroadcastGlobalVariablesCallback(),
                                               hvd::LearningRateWarmupCallback({.initial_lr = 0.4, .warmup_epochs = 2}),
                                               LambdaCallback({.on_train_batch_end = [&](std::int64_t, const Logs&) {
                                                 rates.push_back(model.learning_rate());
                                               }})}});
    ASSERT_EQ(rates.size(), 12);
    for (int step = 0; step < 12; ++step) {
      const double share = std::min(1.0, (step + 1) / 8.0);
      EXPECT_NEAR(rates[static_cast<std::size_t>(step)], 0.1 * (share * 3 + 1), 1e-12) << step;
    }
    expect_says(message_of([] { hvd::LearningRateWarmupCallback({.initial_lr = 0}); }), "initial_lr is 0");
  });
}

TEST(HorovodFit, ARankWhoseDataEndEarlierGoesOnWithoutExamples) {
  // Rank 0 has all of 4 batches, rank 1 the first 2 once more.
  const auto initial = (fresh_folder("horovod_fit", "unequal") / "initial").string();
  alone(1, adam(), initial);
  std::vector<Tensor> expected;
  {
    const auto scope = OneDeviceStrategy("cpu:0", 1).scope();
    auto model = make_model(at::kDouble, adam());
    model.load_weights(initial);
    int number = 0;
    const auto doubled = data_of(0, 1).map(
        [&](Example batch) {
          if (number++ % 4 > 1) return batch;
          batch.x = at::cat({batch.x, batch.x});
          batch.y = at::cat({batch.y, batch.y});
          return batch;
        },
        {.num_parallel_calls = 1});
    for (int epoch = 0; epoch < 3; ++epoch) {
      number = 0;
      for (auto iterator = doubled.iterate(); auto batch = iterator.next();) model.train_on_batch(*batch);
    }
    expected = weights_of(model);
  }
  on_ranks(2, [&](int rank) {
    auto model = make_model(at::kDouble, hvd::DistributedOptimizer(adam()));
    model.load_weights(initial);
    const auto data = rank == 0 ? data_of(0, 1) : data_of(0, 1).take(2);
    model.fit(data, {.epochs = 3, .verbose = 0, .callbacks = {hvd::MetricAverageCallback()}});
    EXPECT_EQ(model.iterations(), 12);
    EXPECT_LE(largest_difference(weights_of(model), expected), 1e-9);
  });
}

TEST(HorovodFit, WarmupIsAllRanksWhereOneHasLessData) {
  on_ranks(2, [](int rank) {
    auto model = make_model(at::kDouble, hvd::DistributedOptimizer(SGD({.learning_rate = 0.25})));
    std::vector<double> rates;
    const LambdaCallback notes(
        {.on_train_batch_end = [&](std::int64_t, const Logs&) { rates.push_back(model.learning_rate()); }});
    model.fit(rank == 0 ? data_of(0, 1) : data_of(0, 1).take(2),
              {.epochs = 2,
               .verbose = 0,
               .callbacks = {hvd::BroadcastGlobalVariablesCallback(),
                             hvd::LearningRateWarmupCallback({.initial_lr = 0.4, .warmup_epochs = 2}), notes}});
    ASSERT_EQ(rates.size(), 8);
    for (std::size_t step = 0; step < 8; ++step) EXPECT_NEAR(rates[step], 0.2 * ((step + 1) / 8.0 + 1), 1e-12);
  });
}

TEST(HorovodFit, WhatOneRankStopsEndsForAllAfterTheSameStep) {
  on_ranks(2, [](int rank) {
    auto model = make_model(at::kDouble, hvd::DistributedOptimizer(adam()));
    int steps = 0;
    const LambdaCallback stops({.on_train_batch_end = [&](std::int64_t, const Logs&) {
      if (++steps == 5 && rank == 1) model.stop_training();
    }});
    model.fit(data_of(rank, 2),
              {.epochs = 9, .verbose = 0, .callbacks = {hvd::BroadcastGlobalVariablesCallback(), stops}});
    EXPECT_EQ(model.iterations(), 6);  // they agree in the next one
  });
}

TEST(HorovodFit, OneRankAloneMayEvaluateBeforeAllFit) {
  on_ranks(2, [](int rank) {
    auto model = make_model(at::kDouble, hvd::DistributedOptimizer(adam()));
    if (rank == 0) {
      EXPECT_GT(model.evaluate(data_of(0, 1))["loss"], 0);
    }
    hvd::barrier();
    model.fit(data_of(rank, 2), {.verbose = 0, .callbacks = {hvd::BroadcastGlobalVariablesCallback()}});
    EXPECT_EQ(model.iterations(), 4);
  });
}

TEST(HorovodFit, WhatGoesWrongIsNamed) {
  const auto initial = (fresh_folder("horovod_fit", "wrong") / "initial").string();
  alone(1, adam(), initial);
  on_ranks(2, [&](int rank) {
    expect_says(message_of([] { hvd::DistributedOptimizer(adam(), {.op = hvd::Min}); }), "op is Min");
    const hvd::BroadcastGlobalVariablesCallback broadcast;
    const auto optimizer = hvd::DistributedOptimizer(Adam({.learning_rate = rank == 0 ? 0.1 : 0.2}));
    expect_says(message_of([&] {
                  make_model(at::kDouble, optimizer).fit(data_of(rank, 2), {.verbose = 0, .callbacks = {broadcast}});
                }),
                "the ranks' optimizers differ");
    auto ahead = make_model(at::kDouble, hvd::DistributedOptimizer(adam()));
    ahead.load_weights(initial);
    std::vector<AnyCallback> callbacks;
    if (rank == 0)
      callbacks.push_back(
          LambdaCallback({.on_train_begin = [&] { unwrap(ahead).gradients->updater().set_iterations(3); }}));
    expect_says(message_of([&] { ahead.fit(data_of(rank, 2), {.verbose = 0, .callbacks = callbacks}); }), "step 3");
    const auto good = hvd::DistributedOptimizer(adam());
    auto model = make_model(at::kDouble, good);
    const auto said = message_of([&] {
      model.fit(data_of(rank, 2).map([rank](Example batch) {
        if (rank == 1) throw Error("no more images");
        return batch;
      }),
                {.verbose = 0, .callbacks = {broadcast}});
    });
    expect_says(said, "no more images");
  });
}

TEST(HorovodFit, AnEstimatorGoesOnAtTheEndOfItsData) {
  const auto folder = fresh_folder("horovod_fit", "estimator").string();
  on_ranks(2, [&](int rank) {
    const auto model_fn = [](const Example&, ModeKeys mode, const Params&) {
      EstimatorSpec spec{.model = Sequential({Dense(9, {.activation = "tanh"}), Dense(3)})};
      spec.loss = SparseCategoricalCrossentropy({.from_logits = true});
      if (mode == ModeKeys::train) spec.optimizer = hvd::DistributedOptimizer(adam());
      return spec;
    };
    for (const std::int64_t step : {4, 7, 8, 12}) {
      Estimator estimator(model_fn, {.model_dir = rank == 0 ? folder : "", .log_step_count_steps = 0});
      const TrainOptions options{.max_steps = step, .hooks = {hvd::BroadcastGlobalVariablesHook(0)}};
      estimator.train([&] { return data_of(rank, 2); }, options);
      EXPECT_EQ(estimator.evaluate([&] { return data_of(rank, 2); })["global_step"], step);
    }
  });
}

}  // namespace
}  // namespace lockstep
