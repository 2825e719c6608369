// Horovod's optimizer and callbacks under fit, against one process on all ranks' examples. Ranks are threads.
#include <gtest/gtest.h>
#include <lockstep/horovod.h>
#include <lockstep/lockstep.h>

#include "base/expect_says.h"
#include "base/fresh_folder.h"
#include "horovod/session.h"
#include "tests/workers.h"

namespace lockstep {
namespace {

namespace hvd = horovod;

void on_ranks(int size, const std::function<void(int)>& body) {
  const auto groups = make_thread_groups(size);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto& group = groups[static_cast<std::size_t>(rank)];
      const World world{.rank = rank, .size = size, .local_rank = rank, .local_size = size};
      const hvd::Session::Use use(std::make_shared<hvd::Session>(hvd::Session::Position{world}, group, 60));
      try {
        const auto scope = OneDeviceStrategy("cpu:0", 1).scope();
        body(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
        group.abort(error.what());
      }
    });
  }
}

Optimizer adam() { return Adam({.learning_rate = 0.05}); }

// What rank r of n reads of batches of 7 is every n-th example of them, so that batches are those of one process.
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
        model.fit(data_of(rank, 2).shuffle(4, {.seed = 5}), {.epochs = 3, .callbacks = callbacks, .verbose = 0});
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
        {.callbacks = {LambdaCallback({.on_epoch_end = [&](int, const Logs& logs) { seen = logs["accuracy"]; }}),
                       hvd::MetricAverageCallback()},
         .verbose = 0});
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
                                 .callbacks = {hvd::LearningRateWarmupCallback({.initial_lr = 0.4, .warmup_epochs = 2}),
                                               LambdaCallback({.on_train_batch_end =
                                                                   [&](std::int64_t, const Logs&) {
                                                                     rates.push_back(model.learning_rate());
                                                                   }})},
                                 .verbose = 0});
    ASSERT_EQ(rates.size(), 12);
    for (int step = 0; step < 12; ++step) {
      const double share = std::min(1.0, (step + 1) / 8.0);
      EXPECT_NEAR(rates[static_cast<std::size_t>(step)], 0.1 * (share * 3 + 1), 1e-12) << step;
    }
    expect_says(message_of([] { hvd::LearningRateWarmupCallback({.initial_lr = 0}); }), "initial_lr is 0");
  });
}

TEST(HorovodFit, WhatGoesWrongIsNamed) {
  on_ranks(2, [](int rank) {
    expect_says(message_of([] { hvd::DistributedOptimizer(adam(), {.op = hvd::Min}); }), "op is min");
    const auto optimizer = hvd::DistributedOptimizer(Adam({.learning_rate = rank == 0 ? 0.1 : 0.2}));
    expect_says(message_of([&] { make_model(at::kDouble, optimizer); }), "the workers' optimizers differ");
    const auto good = hvd::DistributedOptimizer(adam());
    auto model = make_model(at::kDouble, good);
    const auto said = message_of([&] {
      model.fit(data_of(rank, 2).map([rank](Example batch) {
        if (rank == 1) throw Error("no more images");
        return batch;
      }),
                {.verbose = 0});
    });
    expect_says(said, "no more images");
  });
}

}  // namespace
}  // namespace lockstep
