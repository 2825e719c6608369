// Callbacks as users of Keras expect them.
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

Dataset data() {
  const auto x = at::linspace(-1, 1, 20).view({20, 1});
  return Dataset::from_tensor_slices(x, x * 2 + 1).batch(4);
}

Sequential make_model(double rate = 0.1) {
  set_random_seed(2);
  Sequential model({Dense(1)});
  model.compile({.optimizer = SGD({.learning_rate = rate}), .loss = "mse", .metrics = {"mae"}});
  model.build({1});
  return model;
}

// Writes down what it is told.
class Recorder : public Callback {
 public:
  void on_train_begin() override { calls += "[ "; }
  void on_epoch_begin(int epoch) override { calls += "epoch" + std::to_string(epoch) + "( "; }
  void on_train_batch_begin(std::int64_t batch) override { calls += "b" + std::to_string(batch) + " "; }
  void on_train_batch_end(std::int64_t, const Logs& logs) override {
    EXPECT_TRUE(logs.contains("loss") && logs.contains("mae"));
  }
  void on_test_begin() override { calls += "test "; }
  void on_epoch_end(int, const Logs& logs) override { calls += logs.contains("val_loss") ? "val) " : ") "; }
  void on_train_end() override { calls += "]"; }
  std::string calls;
};

TEST(Callbacks, AreCalledInKerasOrder) {
  auto model = make_model();
  const auto recorder = std::make_shared<Recorder>();
  const auto history =
      model.fit(data().take(2),
                {.epochs = 2, .verbose = 0, .callbacks = {recorder}, .validation_data = data(), .validation_freq = 2});
  EXPECT_EQ(recorder->calls, "[ epoch0( b0 b1 ) epoch1( b0 b1 test val) ]");
  EXPECT_EQ(history.epoch, (std::vector<int>{0, 1}));
  EXPECT_EQ(history["loss"].size(), 2U);
  EXPECT_EQ(history["val_loss"].size(), 1U);
}

TEST(Callbacks, ModelCheckpointNamesKeepsAndFindsFiles) {
  const auto folder = fresh_folder("callbacks", "checkpoint");
  auto model = make_model();
  model.fit(data(), {.epochs = 4,
                     .verbose = 0,
                     .callbacks = {ModelCheckpoint((folder / "w_{epoch:02d}_{loss:.1f}").string(),
                                                   {.save_weights_only = true, .max_to_keep = 2})}});
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()),
            3);  // two checkpoints and the index
  const auto latest = latest_checkpoint(folder.string());
  EXPECT_TRUE(fs::path(latest).filename().string().starts_with("w_04_")) << latest;
  const auto trained = model.predict(data());
  auto other = make_model();
  other.load_weights(latest);
  EXPECT_TRUE(at::equal(other.predict(data()), trained));
}

TEST(Callbacks, ModelCheckpointTakesWideFormatsAndRefusesThoseThatNoNameHasRoomFor) {
  const auto folder = fresh_folder("callbacks", "wide");
  const auto save = [&](const std::string& name) {
    auto model = make_model();
    model.fit(data().take(1), {.epochs = 2, .verbose = 0, .callbacks = {ModelCheckpoint((folder / name).string())}});
  };
  save("{epoch:070d}");
  for (const char* const digit : {"1", "2"}) {
    EXPECT_TRUE(fs::exists(folder / (std::string(69, '0') + digit + ".safetensors")));
  }
  for (const char* const name : {"{epoch:0201d}", "{epoch:09999999999d}", "{loss:.999f}"}) {
    expect_says(message_of<InvalidArgument>([&] { save(name); }), "at most 200");
  }
}

TEST(Callbacks, ModelCheckpointRefusesAFolderWhoseFileCheckpointIsNoList) {
  const auto folder = fresh_folder("callbacks", "no_list");
  std::ofstream(folder / "checkpoint") << "my notes";
  auto model = make_model();
  expect_says(message_of<IoError>([&] {
                model.fit(data(), {.verbose = 0, .callbacks = {ModelCheckpoint((folder / "{epoch}").string())}});
              }),
              "no list of checkpoints");
  EXPECT_EQ(model.iterations(), 0);
}

TEST(Callbacks, ModelCheckpointSavesTheBestOnly) {
  const auto folder = fresh_folder("callbacks", "best");
  auto model = make_model();
  int epoch = 0;
  const auto rates = LearningRateScheduler([&](int, double) { return epoch++ < 2 ? 0.1 : 100.0; });  // then it diverges
  model.fit(data(), {.epochs = 4,
                     .verbose = 0,
                     .callbacks = {rates, ModelCheckpoint((folder / "{epoch}").string(),
                                                          {.monitor = "loss", .save_best_only = true})}});
  EXPECT_EQ(fs::path(latest_checkpoint(folder.string())).filename(), "2");
  EXPECT_FALSE(fs::exists(folder / "3.safetensors"));
}

TEST(Callbacks, EarlyStoppingWaitsAndRestores) {
  auto model = make_model();
  Tensor best;
  int epoch = 0;
  const auto rates = LearningRateScheduler([&](int, double) { return epoch++ < 3 ? 0.1 : 3.0; });
  const auto remember = LambdaCallback({.on_epoch_end = [&](int at, const Logs&) {
    if (at == 2) best = model.predict(data());
  }});
  const auto stopping = std::make_shared<EarlyStopping>(
      EarlyStoppingOptions{.monitor = "loss", .patience = 2, .restore_best_weights = true});
  const auto history = model.fit(data(), {.epochs = 20, .verbose = 0, .callbacks = {rates, remember, stopping}});
  EXPECT_EQ(stopping->stopped_epoch(), 4);
  EXPECT_EQ(history.epoch.size(), 5U);
  EXPECT_TRUE(at::equal(model.predict(data()), best));
}

// The epochs that are trained where "score" has these values, one an epoch.
std::size_t epochs_until_stop(const std::vector<double>& values, const EarlyStoppingOptions& options) {
  class Scores : public Callback {
   public:
    explicit Scores(const std::vector<double>& values) : values_(values) {}
    void on_epoch_logs(int epoch, Logs& logs) override { logs.set("score", values_[static_cast<std::size_t>(epoch)]); }

   private:
    const std::vector<double>& values_;
  };
  auto model = make_model();
  const auto history = model.fit(
      data(),
      {.epochs = static_cast<int>(values.size()), .verbose = 0, .callbacks = {Scores(values), EarlyStopping(options)}});
  return history.epoch.size();
}

// Compares with keras.callbacks.EarlyStopping on the same values.
TEST(Callbacks, EarlyStoppingsOptionsAreKeras) {
  const auto options = [](int patience) {
    return EarlyStoppingOptions{.monitor = "score", .patience = patience, .mode = Mode::min};
  };
  EXPECT_EQ(epochs_until_stop({1, 2, 3}, options(0)), 2U);
  EXPECT_EQ(epochs_until_stop({3, 2, 1}, options(0)), 3U);

  auto by_delta = options(2);
  EXPECT_EQ(epochs_until_stop({1, 0.95, 0.92, 0.89, 0.87}, by_delta), 5U);
  by_delta.min_delta = 0.1;
  EXPECT_EQ(epochs_until_stop({1, 0.95, 0.92, 0.89, 0.87}, by_delta), 3U);

  auto largest = options(2);
  largest.mode = Mode::max;
  EXPECT_EQ(epochs_until_stop({0.1, 0.2, 0.15, 0.14, 0.3}, largest), 4U);

  auto to_beat = options(2);
  EXPECT_EQ(epochs_until_stop({0.9, 0.8, 0.85, 0.86, 0.1}, to_beat), 4U);
  to_beat.baseline = 0.5;  // what is better than before, and not than this, does not count
  EXPECT_EQ(epochs_until_stop({0.9, 0.8, 0.85, 0.86, 0.1}, to_beat), 3U);
  EXPECT_EQ(epochs_until_stop({0.4, 0.45, 0.3, 0.35, 0.2}, to_beat), 5U);

  auto late = options(1);
  late.start_from_epoch = 3;
  EXPECT_EQ(epochs_until_stop({1, 2, 3, 4, 5, 6}, late), 5U);
}

TEST(Callbacks, ModelCheckpointSavesEverySoManyBatchesAcrossEpochs) {
  const auto folder = fresh_folder("callbacks", "save_freq");
  auto model = make_model();  // five batches an epoch
  model.fit(data(), {.epochs = 2,
                     .verbose = 0,
                     .callbacks = {ModelCheckpoint((folder / "at_{epoch}_{batch}").string(),
                                                   {.save_weights_only = true, .save_freq = 3})}});
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"at_1_3", "at_2_1", "at_2_4"}));
}

TEST(Callbacks, TerminateOnNaNStopsWithinTheEpoch) {
  auto model = make_model(1e30);
  int batches = 0;
  const auto count = LambdaCallback({.on_train_batch_end = [&](std::int64_t, const Logs&) { ++batches; }});
  model.fit(data(), {.epochs = 50, .verbose = 0, .callbacks = {count, TerminateOnNaN()}});
  EXPECT_LT(batches, 50);
}

TEST(Callbacks, CSVLoggerWritesALineAnEpoch) {
  const auto file = fresh_folder("callbacks", "csv") / "log.csv";
  for (const bool append : {false, true}) {
    auto model = make_model();
    model.fit(data(), {.epochs = 2, .verbose = 0, .callbacks = {CSVLogger(file.string(), {.append = append})}});
  }
  std::ifstream in(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 5U);
  EXPECT_EQ(lines[0], "epoch,loss,mae");
  EXPECT_TRUE(lines[1].starts_with("0,") && lines[2].starts_with("1,") && lines[3].starts_with("0,"));
}

TEST(Callbacks, CSVLoggerDoesNotJoinALineThatWasCutOff) {
  const auto file = fresh_folder("callbacks", "cut") / "log.csv";
  std::ofstream(file) << "epoch,loss,mae\n0,1.5,0.5\n1,0.2";
  auto model = make_model();
  model.fit(data(),
            {.epochs = 3, .verbose = 0, .callbacks = {CSVLogger(file.string(), {.append = true})}, .initial_epoch = 1});
  std::ifstream in(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 5U);
  EXPECT_EQ(lines[1], "0,1.5,0.5");
  EXPECT_EQ(lines[2], "1,0.2");
  for (int i : {3, 4}) {
    const auto& line = lines[static_cast<std::size_t>(i)];
    EXPECT_TRUE(line.starts_with(std::to_string(i - 2) + ",")) << line;
    EXPECT_EQ(std::count(line.begin(), line.end(), ','), 2) << line;
  }
}

TEST(Fit, EmptyValidationDataAreFoundBeforeTheFirstStep) {
  const auto folder = fresh_folder("callbacks", "no_validation");
  const auto none = [] { return [] { return std::optional<Example>(); }; };
  for (const auto& empty : {data().take(0), Dataset::from_generator(none), Dataset::from_generator(none, 5).take(0)}) {
    auto model = make_model();
    const auto options = FitOptions{
        .verbose = 0, .callbacks = {ModelCheckpoint((folder / "{epoch}").string())}, .validation_data = empty};
    expect_says(message_of<InvalidArgument>([&] { model.fit(data(), options); }), "validation_data is empty");
    EXPECT_EQ(model.iterations(), 0);
  }
  auto model = make_model();  // no epoch of this fit validates
  EXPECT_NO_THROW(model.fit(data(), {.verbose = 0, .validation_data = data().take(0), .validation_freq = 2}));
}

TEST(Callbacks, SchedulesAndSchedulersSetTheRate) {
  auto model = make_model();
  std::vector<double> rates;
  const auto record =
      LambdaCallback({.on_epoch_end = [&](int, const Logs&) { rates.push_back(model.learning_rate()); }});
  model.fit(data(),
            {.epochs = 3,
             .verbose = 0,
             .callbacks = {LearningRateScheduler([](int epoch, double rate) { return epoch == 0 ? rate : rate / 2; }),
                           record}});
  EXPECT_EQ(rates, (std::vector<double>{0.1, 0.05, 0.025}));
}

TEST(Fit, StepsPerEpochGoOnThroughTheData) {
  auto model = make_model();
  const auto history = model.fit(data().repeat(), {.epochs = 3, .verbose = 0, .steps_per_epoch = 3});
  EXPECT_EQ(model.iterations(), 9);
  auto short_of_data = make_model();
  EXPECT_EQ(short_of_data.fit(data(), {.epochs = 3, .verbose = 0, .steps_per_epoch = 3}).epoch.size(),
            2U);  // 5 batches: 3 and 2
  EXPECT_EQ(short_of_data.iterations(), 5);
}

TEST(Fit, GoesOnFromAnInitialEpoch) {
  auto model = make_model();
  const auto history = model.fit(data(), {.epochs = 5, .verbose = 0, .initial_epoch = 3});
  EXPECT_EQ(history.epoch, (std::vector<int>{3, 4}));
}

// A loss, a metric, an optimizer, a layer and a callback of one's own, as the README shows.
class SignSGD final : public SpanRule<SignSGD> {
 public:
  std::string name() const override { return "sign_sgd"; }
  std::vector<StateSpec> states() const override { return {}; }
  template <class T>
  void apply(const UpdateStep& step, std::span<T> value, std::span<const T> gradient, std::span<T* const>) const {
    for (std::size_t i = 0; i < value.size(); ++i)
      value[i] -= static_cast<T>(step.learning_rate) * static_cast<T>((gradient[i] > 0) - (gradient[i] < 0));
  }
};

class WithinTenth final : public MetricFunction {
 public:
  std::string name() const override { return "within_tenth"; }
  std::size_t state_size() const override { return 2; }
  void update(std::span<double> state, const Tensor& y_true, const Tensor& y_pred, const Tensor&) const override {
    state[0] += (y_true - y_pred).abs().lt(0.1).sum().item<double>();
    state[1] += static_cast<double>(y_pred.numel());
  }
  double result(std::span<const double> state) const override { return state[0] / state[1]; }
};

TEST(Own, LossMetricOptimizerAndLayer) {
  set_random_seed(1);
  const MirroredStrategy strategy(2);
  const auto scope = strategy.scope();
  Sequential model({Dense(1), Activation({"double", [](const Tensor& x) { return x * 2; }})});
  model.compile({.optimizer = Optimizer(std::make_shared<SignSGD>(), {.learning_rate = 0.01}),
                 .loss = Loss("fourth_power", [](const Tensor& y_true,
                                                 const Tensor& y_pred) { return (y_true - y_pred).pow(4).mean(-1); }),
                 .metrics = {Metric(std::make_shared<WithinTenth>())}});
  model.fit(data(), {.epochs = 60, .verbose = 0});
  EXPECT_GT(model.evaluate(data())["within_tenth"], 0.9);
}

}  // namespace
}  // namespace lockstep
