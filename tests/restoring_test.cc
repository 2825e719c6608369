// Tests trainings that stopped and go on from a checkpoint: at the exact example, with the same metrics, and whole or
// not at all.
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <ATen/ATen.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <numeric>
#include <sstream>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "fails_after.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr int kExamples = 101;

// The labels that a loss was asked for, in any order.
class Seen {
 public:
  Loss loss() {
    return Loss("remembers", [this](const Tensor& y_true, const Tensor& y_pred) {
      const std::lock_guard lock(mutex_);
      for (std::int64_t i = 0; i < y_true.size(0); ++i) labels_.push_back(y_true[i].item<int>());
      return (y_pred.flatten() - y_true.flatten()).square() * 1e-6;
    });
  }
  std::vector<int> sorted() const {
    auto labels = labels_;
    std::sort(labels.begin(), labels.end());
    return labels;
  }
  void clear() { labels_.clear(); }

 private:
  std::mutex mutex_;
  std::vector<int> labels_;
};

std::vector<int> each_once(int times = 1) {
  std::vector<int> labels;
  for (int i = 0; i < kExamples * times; ++i) labels.push_back(i / times);
  return labels;
}

Dataset examples() {
  const auto numbers = at::arange(kExamples, at::kFloat);
  return Dataset::from_tensor_slices(numbers.view({kExamples, 1}), numbers);
}

Sequential model_of(Seen& seen) {
  Sequential model({Dense(1)});
  model.compile({.optimizer = SGD({.learning_rate = 1e-9}), .loss = seen.loss()});
  return model;
}

using Pipeline = std::function<Dataset(std::int64_t batch_size)>;

// Trains `batches` batches of `size` on one replica, then goes on with others on two; returns what both have seen.
std::vector<int> stop_and_go_on(const std::string& name, const Pipeline& pipeline, std::int64_t size,
                                std::int64_t batches, std::int64_t other_size, std::int64_t steps_per_epoch = 0,
                                std::int64_t other_steps = 0) {
  const auto folder = fresh_folder("restoring", name).string();
  Seen seen;
  {
    set_random_seed(5);
    const auto data = pipeline(size);
    auto model = model_of(seen);
    EXPECT_THROW(model.fit(data, {.verbose = 0,
                                  .callbacks = {BackupAndRestore(folder, {.save_freq = 1}), FailsAfter(batches)},
                                  .steps_per_epoch = steps_per_epoch}),
                 std::runtime_error);
  }
  set_random_seed(5);
  const auto data = pipeline(other_size);
  const MirroredStrategy strategy(2);
  const auto scope = strategy.scope();
  auto model = model_of(seen);
  model.fit(data, {.verbose = 0, .callbacks = {BackupAndRestore(folder)}, .steps_per_epoch = other_steps});
  return seen.sorted();
}

TEST(Restoring, GoesOnAtTheExactExampleWithBatchesOfAnotherSize) {
  const auto same = [](Example example) { return example; };
  const std::map<std::string, Pipeline> pipelines{
      {"plain", [](auto size) { return examples().batch(size); }},
      {"shuffled", [](auto size) { return examples().shuffle(kExamples).batch(size); }},
      {"mapped", [&](auto size) { return examples().shuffle(30).batch(size).map(same).prefetch(2); }},
      {"in_threads", [&](auto size) { return examples().map(same, {.num_parallel_calls = 2}).batch(size); }},
  };
  for (const auto& [name, pipeline] : pipelines) {
    EXPECT_EQ(stop_and_go_on(name, pipeline, 12, 5, 20), each_once()) << name;
    EXPECT_EQ(stop_and_go_on(name + "_smaller", pipeline, 20, 2, 7), each_once()) << name;
    EXPECT_EQ(stop_and_go_on(name + "_same", pipeline, 12, 5, 12), each_once()) << name;
  }
}

// Two passes as one epoch: the first ends within the steps that were made, or does not.
TEST(Restoring, GoesOnAtTheExactExampleOfARepeatedDataSet) {
  const Pipeline repeated = [](auto size) { return examples().batch(size).repeat(2); };
  EXPECT_EQ(stop_and_go_on("repeated", repeated, 12, 11, 20), each_once(2));
  EXPECT_EQ(stop_and_go_on("repeated_first", repeated, 12, 4, 20), each_once(2));
  const Pipeline endless = [](auto size) { return examples().repeat().batch(size); };
  auto seen = stop_and_go_on("endless", endless, 10, 5, 17, 100, 8);  // 50 examples in 5 steps, then 51 in 3
  EXPECT_EQ(seen, each_once());
}

// Goes on twice: what was begun at an example has batches that begin anywhere.
TEST(Restoring, GoesOnAgainAfterItWentOn) {
  const auto folder = fresh_folder("restoring", "twice").string();
  Seen seen;
  for (const auto& [size, batches] : {std::pair(12, 3), std::pair(10, 6), std::pair(10, 8), std::pair(9, 99)}) {
    set_random_seed(5);
    const auto data = examples().shuffle(kExamples).batch(size);
    auto model = model_of(seen);
    try {
      model.fit(data, {.verbose = 0, .callbacks = {BackupAndRestore(folder, {.save_freq = 1}), FailsAfter(batches)}});
    } catch (const std::runtime_error&) {
    }
  }
  EXPECT_EQ(seen.sorted(), each_once());
}

// Batches that a generator makes begin where it wants.
TEST(Restoring, APlaceWhereNoBatchBeginsIsAnError) {
  const Pipeline generated = [](auto size) {
    return Dataset::from_generator([size]() -> Dataset::Generator {
      return [size, at = std::int64_t{0}]() mutable -> std::optional<Example> {
        if (at >= kExamples) return std::nullopt;
        const auto numbers = at::arange(at, std::min<std::int64_t>(at + size, kExamples), at::kFloat);
        at += size;
        return Example{numbers.view({-1, 1}), numbers};
      };
    });
  };
  EXPECT_EQ(stop_and_go_on("generated", generated, 12, 5, 20), each_once());  // 60 is a multiple of both
  expect_says(message_of<InvalidArgument>([&] { stop_and_go_on("generated_off", generated, 12, 4, 20); }),
              "after its first 48 examples");
}

// --- the rest of what a checkpoint holds

Dataset noise() {
  set_random_seed(8);
  const auto x = at::rand({64, 4}, at::kDouble), y = at::rand({64, 1}, at::kDouble);
  return Dataset::from_tensor_slices(x, y).batch(8);
}

Sequential model_of_noise() {
  set_random_seed(9);
  Sequential model({Dense(7, {.activation = "tanh"}), Dense(1)});
  model.compile({.optimizer = Adam(), .loss = "mse", .metrics = {"mae", "mse"}});
  return model;
}

TEST(Restoring, MetricsOfAnEpochThatGoesOnHaveTheSameBits) {
  const MirroredStrategy strategy(2);
  const auto scope = strategy.scope();
  const auto data = noise();
  auto undisturbed = model_of_noise();
  const auto expected = undisturbed.fit(data, {.epochs = 2, .verbose = 0});
  for (const int batches : {1, 2, 3, 4, 5, 6, 7}) {
    const auto own = fresh_folder("restoring", "metrics" + std::to_string(batches)).string();
    auto first = model_of_noise();
    const BackupAndRestoreOptions often{.save_freq = 1};
    EXPECT_THROW(
        first.fit(data, {.epochs = 2, .verbose = 0, .callbacks = {BackupAndRestore(own, often), FailsAfter(batches)}}),
        std::runtime_error);
    auto second = model_of_noise();
    const auto history = second.fit(data, {.epochs = 2, .verbose = 0, .callbacks = {BackupAndRestore(own, often)}});
    EXPECT_EQ(history.history, expected.history) << "after " << batches << " batches";
  }
}

// The early stop and the interruption come in the same epoch: after the restart nothing is trained.
TEST(Restoring, AnEarlyStopIsNotForgotten) {
  for (const std::int64_t at : {3, 8}) {  // within the epoch, at its end
    const auto folder = fresh_folder("restoring", "stop" + std::to_string(at)).string();
    const auto data = noise();
    auto expected = model_of_noise();
    const auto history =
        expected.fit(data, {.epochs = 5,
                            .verbose = 0,
                            .callbacks = {LambdaCallback({.on_train_batch_end = [&](std::int64_t batch, const Logs&) {
                              if (batch + 1 == at) expected.stop_training();
                            }})}});
    auto first = model_of_noise();
    const auto stop = LambdaCallback({.on_train_batch_end = [&](std::int64_t batch, const Logs&) {
      if (batch + 1 != at) return;
      first.stop_training();
      std::raise(SIGTERM);
    }});
    EXPECT_THROW(first.fit(data, {.epochs = 5, .verbose = 0, .callbacks = {stop, BackupAndRestore(folder)}}),
                 Interrupted);
    auto second = model_of_noise();
    const auto after = second.fit(data, {.epochs = 5, .verbose = 0, .callbacks = {BackupAndRestore(folder)}});
    EXPECT_EQ(after.history, history.history);
  }
}

// A failure on the way leaves everything as it was: here the last callback's entry is damaged.
TEST(Restoring, ALoadHappensWholeOrNotAtAll) {
  const auto folder = fresh_folder("restoring", "whole");
  const auto log = (folder / "log.csv").string(), path = (folder / "state").string();
  const auto data = noise();
  auto model = model_of_noise();
  const auto save = LambdaCallback({.on_epoch_end = [&](int, const Logs&) { model.save_checkpoint(path); }});
  model.fit(data, {.verbose = 0, .callbacks = {CSVLogger(log), EarlyStopping({.monitor = "loss"}), save}});
  auto archive = read_archive(path);
  int damaged = 0;
  for (auto& [name, value] : archive.entries) {
    if (name.find("EarlyStopping") == std::string::npos) continue;
    value = "damaged";
    ++damaged;
  }
  ASSERT_GT(damaged, 0);
  write_archive(path, archive);

  auto other = model_of_noise();
  other.build({4}, at::kDouble);
  const auto weights = other.predict(data);
  std::string message, lines;
  const auto load = LambdaCallback({.on_epoch_begin = [&](int) {
    std::ofstream(log, std::ios::app) << "a line of its own\n";
    message = message_of<DataError>([&] { other.load_checkpoint(path); });
    std::ostringstream now;
    now << std::ifstream(log).rdbuf();
    lines = now.str();
    EXPECT_TRUE(at::equal(other.predict(data), weights));
    EXPECT_EQ(other.iterations(), 0);
  }});
  other.fit(data, {.verbose = 0, .callbacks = {CSVLogger(log), EarlyStopping({.monitor = "loss"}), load}});
  expect_says(message, "damaged");
  EXPECT_EQ(lines, "a line of its own\n");
}

TEST(Restoring, KeysOfCallbacksAreNamesThatAPersonReads) {
  const auto folder = fresh_folder("restoring", "keys").string();
  auto model = model_of_noise();
  model.fit(noise(), {.verbose = 0,
                      .callbacks = {BackupAndRestore(folder, {.delete_checkpoint = false}),
                                    LearningRateScheduler([](int, double rate) { return rate; })}});
  const auto entries = read_archive(folder + "/backup").entries;
  EXPECT_TRUE(entries.contains("callback/lockstep::LearningRateScheduler/0/epoch"));
}

// --- folders

TEST(Restoring, AFolderOfAnotherJobIsAnErrorWhenTrainingBegins) {
  const auto folder = fresh_folder("restoring", "in_use").string();
  const auto data = noise();
  auto model = model_of_noise();
  std::string message;
  const auto another_job = LambdaCallback({.on_epoch_end = [&](int, const Logs&) {
    auto other = model_of_noise();
    message = message_of<IoError>([&] { other.fit(data, {.verbose = 0, .callbacks = {BackupAndRestore(folder)}}); });
  }});
  const FitOptions options{.verbose = 0, .callbacks = {BackupAndRestore(folder), another_job}};
  model.fit(data, options);
  expect_says(message, "in use by process");
  auto next = model_of_noise();
  EXPECT_NO_THROW(next.fit(data, {.verbose = 0, .callbacks = {BackupAndRestore(folder)}}));  // it was released
}

TEST(Restoring, WhatCannotBeSavedIsFoundBeforeTheFirstStep) {
  const auto folder = fresh_folder("restoring", "unwritable");
  std::ofstream(folder / "file") << "x";
  const auto data = noise();
  const auto message_with = [&](const AnyCallback& callback) {
    auto model = model_of_noise();
    std::int64_t batches = 0;
    const auto count = LambdaCallback({.on_train_batch_end = [&](std::int64_t, const Logs&) { ++batches; }});
    const auto message = message_of([&] { model.fit(data, {.verbose = 0, .callbacks = {callback, count}}); });
    EXPECT_EQ(batches, 0) << message;
    return message;
  };
  expect_says(message_with(ModelCheckpoint((folder / "file" / "ckpt_{epoch}").string())), "file");
  expect_says(message_with(BackupAndRestore((folder / "file" / "backup").string())), "file");
  expect_says(message_with(ModelCheckpoint((folder / "ckpt_{val_loss:.2f}").string())), "no validation_data");
  expect_says(message_with(ModelCheckpoint((folder / "ckpt_{los}").string())), "{los}");
}

TEST(Restoring, ACheckpointNamedByValidationIsSavedWhenInterrupted) {
  const auto folder = fresh_folder("restoring", "val_name");
  const auto data = noise();
  auto model = model_of_noise();
  const auto interrupt = LambdaCallback({.on_train_batch_end = [](std::int64_t batch, const Logs&) {
    if (batch == 1) std::raise(SIGINT);
  }});
  EXPECT_THROW(
      model.fit(data, {.verbose = 0,
                       .callbacks = {ModelCheckpoint((folder / "{epoch:02d}_{val_loss:.2f}").string()), interrupt},
                       .validation_data = data}),
      Interrupted);
  EXPECT_TRUE(fs::exists(folder / "01_nan.safetensors"));
  EXPECT_EQ(latest_checkpoint(folder.string()), (folder / "01_nan").string());
}

}  // namespace
}  // namespace lockstep
