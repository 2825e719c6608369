// Callbacks, layers, labels, weights and data as users of Keras mean them: as a plain loop computes, or refused.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "tests/workers.h"

namespace lockstep {
namespace {

const double kNaN = std::numeric_limits<double>::quiet_NaN();

// --- modes of callbacks

struct R2 final : MetricFunction {
  explicit R2(Mode way) : mode(way) {}
  std::string name() const override { return "r2"; }
  std::size_t state_size() const override { return 4; }
  void update(std::span<double> state, const Tensor& y_true, const Tensor& y_pred, const Tensor&) const override {
    state[0] += (y_true - y_pred).square().sum().item<double>();
    state[1] += y_true.sum().item<double>();
    state[2] += y_true.square().sum().item<double>();
    state[3] += static_cast<double>(y_true.numel());
  }
  double result(std::span<const double> state) const override {
    return 1 - state[0] / (state[2] - state[1] * state[1] / state[3]);
  }
  Mode better() const override { return mode; }
  Mode mode;
};

TEST(Monitors, ModeAutomaticAsksTheMetric) {
  const MirroredStrategy strategy(2);
  const auto scope = strategy.scope();
  const auto x = waves(32, 3), y = x.sum(1, true);
  const auto data = Dataset::from_tensor_slices(x, y).batch(8);
  const auto fit = [&](Mode of_metric, EarlyStoppingOptions options) {
    set_random_seed(1);
    Sequential model({Dense(1)});
    model.compile({.optimizer = SGD({.learning_rate = 0.02}),
                   .loss = "mse",
                   .metrics = {Metric(std::make_shared<R2>(of_metric)), "mae"}});
    options.patience = 2;
    options.restore_best_weights = true;
    const auto history =
        model.fit(data, {.epochs = 8, .verbose = 0, .callbacks = {EarlyStopping(options)}, .validation_data = data});
    return std::pair(history[options.monitor], model.evaluate(data)[options.monitor.substr(4)]);
  };
  for (const auto& [of_metric, asked] :
       {std::pair(Mode::max, Mode::automatic), std::pair(Mode::automatic, Mode::max)}) {
    const auto [values, restored] = fit(of_metric, {.monitor = "val_r2", .mode = asked});
    EXPECT_EQ(restored, *std::max_element(values.begin(), values.end()));
  }
  const auto [errors, restored] = fit(Mode::automatic, {.monitor = "val_mae"});
  EXPECT_EQ(restored, *std::min_element(errors.begin(), errors.end()));
  expect_says(message_of<InvalidArgument>([&] { fit(Mode::automatic, {.monitor = "val_r2"}); }), "pass .mode");
  expect_says(message_of<InvalidArgument>([&] { fit(Mode::automatic, {.monitor = "val_mea"}); }),
              "it monitors val_mea, which no metric is called; there are loss, ");
  Sequential model({Dense(1)});
  model.compile({.loss = "mse", .metrics = {Metric(std::make_shared<R2>(Mode::automatic))}});
  const ModelCheckpoint best(fresh_folder("fit_results", "best").string() + "/best",
                             {.monitor = "r2", .save_best_only = true});
  expect_says(message_of<InvalidArgument>([&] { model.fit(data, {.verbose = 0, .callbacks = {best}}); }), "pass .mode");
}

TEST(Monitors, NumbersOutOfRangeAreRefused) {
  EXPECT_THROW(EarlyStopping({.min_delta = kNaN}), InvalidArgument);
  EXPECT_THROW(EarlyStopping({.patience = -1}), InvalidArgument);
  EXPECT_THROW(EarlyStopping({.baseline = kNaN}), InvalidArgument);
  EXPECT_THROW(EarlyStopping({.start_from_epoch = -1}), InvalidArgument);
  EXPECT_THROW(LearningRateScheduler(nullptr), InvalidArgument);
  EXPECT_THROW(BatchNormalization({.epsilon = kNaN}), InvalidArgument);
  EXPECT_THROW(LayerNormalization({.epsilon = -1}), InvalidArgument);
  EXPECT_THROW(Precision({.threshold = kNaN}), InvalidArgument);
  EXPECT_THROW(Recall({.top_k = 0}), InvalidArgument);
  EXPECT_THROW(SGD({.clipnorm = std::numeric_limits<double>::infinity()}), InvalidArgument);
}

// In Keras too, -1 is as hard to reach as 1.
TEST(Monitors, ANegativeMinDeltaIsItsAbsoluteValue) {
  const auto x = waves(8, 2);
  const auto data = Dataset::from_tensor_slices(x, x.sum(1, true)).batch(8);
  for (const double delta : {1e9, -1e9}) {
    Sequential model({Dense(1)});
    model.compile({.optimizer = SGD({.learning_rate = 0.001}), .loss = "mse"});
    const EarlyStopping stop({.monitor = "loss", .min_delta = delta, .patience = 1});
    EXPECT_EQ(model.fit(data, {.epochs = 5, .verbose = 0, .callbacks = {stop}}).epoch.size(), 2U) << delta;
  }
}

// --- layers that are shared

TEST(SharedLayers, ALayerThatComesTwiceHasItsWeightsOnce) {
  const auto x = waves(11, 3), y = x * 2 - 1;
  const auto data = Dataset::from_tensor_slices(x, y).batch(4);
  for (const int replicas : {1, 2, 3}) {
    const MirroredStrategy strategy(replicas);
    const auto scope = strategy.scope();
    const Dense shared(3);
    Sequential model({shared, Activation("tanh"), shared});
    model.compile({.optimizer = SGD({.learning_rate = 0.02}), .loss = "mse"});
    model.build({3}, at::kDouble);
    auto line = weights_of(model);
    ASSERT_EQ(line.size(), 2U);
    model.fit(data, {.epochs = 3, .verbose = 0});
    for (auto& each : line) each.set_requires_grad(true);
    for (int epoch = 0; epoch < 3; ++epoch) {
      for (int begin = 0; begin < 11; begin += 4) {
        const auto some = x.slice(0, begin, begin + 4), wanted = y.slice(0, begin, begin + 4);
        const auto once = at::tanh(at::linear(some, line[0], line[1]));
        (at::linear(once, line[0], line[1]) - wanted).square().mean().backward();
        const at::NoGradGuard no_grad;
        for (auto& each : line) each.sub_(std::exchange(each.mutable_grad(), Tensor()) * 0.02);
      }
    }
    EXPECT_LT(largest_difference(weights_of(model), {line[0].detach(), line[1].detach()}), 1e-12) << replicas;
    expect_says(model.summary(), "Total params: 12");
  }
  const Dense wide(5);
  Sequential wrong({wide, wide});
  expect_says(message_of<InvalidArgument>([&] { wrong.build({3}); }), "a layer that comes again");
}

TEST(SharedLayers, ANestedModelKeepsItsWeightsAndIsUsedThroughTheOther) {
  const auto x = waves(12, 3).to(at::kFloat), y = x.sum(1, true);
  const auto data = Dataset::from_tensor_slices(x, y).batch(4);
  const MirroredStrategy strategy(2);
  const auto scope = strategy.scope();
  const auto make = [] { return Sequential({Dense(4, {.activation = "relu"}), BatchNormalization(), Dense(1)}); };
  auto base = make();
  base.compile({.optimizer = Adam({.learning_rate = 0.05}), .loss = "mse"});
  base.fit(data, {.epochs = 3, .verbose = 0});
  const auto outputs = base.predict(data);
  const auto path = fresh_folder("fit_results", "base").string() + "/weights";
  base.save_weights(path);

  Sequential tuned({Layer(base), Activation("linear"), Layer(base)});  // the second takes other inputs
  expect_says(message_of<InvalidArgument>([&] { tuned.predict(data); }), "a layer that comes again");
  auto again = make(), loaded = make(), fresh = make();
  again.load_weights(path);
  loaded.load_weights(path);
  Sequential of_built({Layer(again)}), of_loaded({Layer(loaded)});
  EXPECT_TRUE(at::equal(of_built.predict(data), outputs));
  EXPECT_TRUE(at::equal(of_loaded.predict(data), outputs));
  for (const auto& act : std::vector<std::function<void()>>{
           [&] { loaded.predict(data); }, [&] { loaded.compile({.loss = "mse"}); }, [&] { loaded.load_weights(path); },
           [&] { loaded.save_weights(path); }, [&] { loaded.module(); }, [&] { loaded.build({3}); }})
    expect_says(message_of<InvalidArgument>(act), "a part of the model in which it was nested");
  for (const auto& act : std::vector<std::function<void()>>{
           [&] { base.evaluate(data); }, [&] { base.fit(data, {.verbose = 0}); }, [&] { base.predict(data); },
           [&] { base.summary(); }, [&] { base.save_weights(path); }, [&] { base.save_checkpoint(path + "_of_all"); },
           [&] { base.load_checkpoint(path + "_of_all"); }})
    expect_says(message_of<InvalidArgument>(act), "a part of the model in which it was nested");
  fresh.build({3});
  Sequential other({fresh.layers()[0]});
  expect_says(message_of<InvalidArgument>([&] { other.build({3}); }), "part of another model");
}

TEST(SharedLayers, ATrainedModelThatIsNestedGoesOnFromItsWeights) {
  const auto x = waves(12, 3).to(at::kFloat), y = x.sum(1, true);
  const auto data = Dataset::from_tensor_slices(x, y).batch(4);
  const OneDeviceStrategy strategy("cpu:0");
  const auto scope = strategy.scope();
  Sequential base({Dense(4, {.activation = "relu"}), Dense(1)});
  base.compile({.optimizer = Adam({.learning_rate = 0.05}), .loss = "mse"});
  base.fit(data, {.epochs = 3, .verbose = 0});
  const auto outputs = base.predict(data);
  Sequential tuned({Layer(base)});
  EXPECT_TRUE(at::equal(tuned.predict(data), outputs));
}

// --- seeds, labels, weights

TEST(Seeds, FixFirstValuesWheneverTheyAreMade) {
  const OneDeviceStrategy strategy("cpu:0");
  const auto scope = strategy.scope();
  const auto x = at::ones({4, 3});
  const auto make = [] {
    set_random_seed(7);
    return Sequential({Dense(2)});
  };
  auto a = make(), b = make(), c = make();
  const auto data = Dataset::from_tensor_slices(x).shuffle(4).batch(4);
  c.build({3});
  EXPECT_TRUE(at::equal(a.predict(data), b.predict(data)));
  EXPECT_TRUE(at::equal(a.predict(data), c.predict(data)));
}

TEST(ClassWeights, AreThoseOfEachTokensLabel) {
  const auto x = at::arange(60).remainder(10).view({12, 5}), y = at::arange(60).mul(7).remainder(3).view({12, 5});
  const std::map<std::int64_t, double> weights{{0, 1.0}, {1, 10.0}, {2, 100.0}};
  for (const int replicas : {1, 2}) {
    const MirroredStrategy strategy(replicas);
    const auto scope = strategy.scope();
    Sequential model({Embedding(10, 4), Dense(3)});
    model.compile(
        {.optimizer = SGD({.learning_rate = 0}), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
    const auto logits = model.predict(Dataset::from_tensor_slices(x).batch(12));
    const auto losses = -at::log_softmax(logits, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1);
    const auto by_label = at::tensor({1.F, 10.F, 100.F}).index_select(0, y.flatten()).view({12, 5});
    const auto of_examples = at::linspace(1, 2, 12);
    for (const auto& labels : {y, y.unsqueeze(-1)}) {
      for (const auto& sample : {Tensor(), of_examples}) {
        const auto each = sample.defined() ? losses * by_label * sample.unsqueeze(-1) : losses * by_label;
        const auto history = model.fit(Dataset::from_tensor_slices(x, labels, sample).batch(12),
                                       {.verbose = 0, .class_weight = weights});
        const double expected = each.mean().item<double>();
        EXPECT_NEAR(history["loss"][0], expected, 1e-5 * expected);
      }
    }
  }
  const auto refused = [&](const Tensor& labels, const Loss& loss) {
    Sequential model({Dense(labels.size(-1))});
    model.compile({.optimizer = "sgd", .loss = loss});
    return message_of<InvalidArgument>([&] {
      model.fit(Dataset::from_tensor_slices(at::ones({4, 3}), labels).batch(4),
                {.verbose = 0, .class_weight = weights});
    });
  };
  expect_says(refused(at::tensor({1, 1, 0, 0, 1, 1, 0, 0}).view({4, 2}).to(at::kFloat), "mse"), "not one-hot");
  expect_says(refused(at::full({4, 1}, 0.5), "mse"), "no whole numbers");
}

TEST(Weights, OfExamplesAreNumbersFromZero) {
  const auto x = at::ones({4, 3}), y = at::ones({4, 1});
  for (const double bad : {kNaN, -1.0, std::numeric_limits<double>::infinity()}) {
    const auto weight = at::tensor({1.0, bad, 1.0, 1.0});
    for (const auto reduction : {Reduction::sum_over_batch_size, Reduction::sum, Reduction::mean_with_sample_weight}) {
      const MeanSquaredError loss({.reduction = reduction});
      expect_says(message_of<InvalidArgument>([&] { loss(y, x.slice(1, 0, 1), weight); }), "a sample weight is");
    }
    MetricState metric(MeanAbsoluteErrorMetric{});
    expect_says(message_of<InvalidArgument>([&] { metric.update(y, y, weight); }), "a sample weight is");
  }
}

TEST(Labels, OfAnotherKindAreRefused) {
  const auto outputs = at::full({4, 2}, 0.5);
  const auto complex = at::complex(at::ones({4, 2}), at::ones({4, 2}));
  for (const char* name : {"mse", "mae", "huber", "binary_crossentropy", "categorical_crossentropy"})
    expect_says(message_of<InvalidArgument>([&] {
                  Loss loss(name);
                  loss(complex, outputs);
                }),
                "complex");
  expect_says(
      message_of<InvalidArgument>([&] { Loss("sparse_categorical_crossentropy")(complex.select(1, 0), outputs); }),
      "complex");
  const auto signs = at::tensor({-1.F, 1.F, 1.F, -1.F}).view({4, 1}).expand({4, 2});
  for (const char* name : {"binary_crossentropy", "categorical_crossentropy"})
    expect_says(message_of<InvalidArgument>([&] {
                  Loss loss(name);
                  loss(signs, outputs);
                }),
                "a label is -1");
  for (const char* name : {"precision", "recall", "binary_accuracy"}) {
    MetricState metric{Metric(name)};
    expect_says(message_of<InvalidArgument>([&] { metric.update(signs, outputs); }), "a label is -1");
  }
}

// Probabilities that were computed are rounded.
TEST(Labels, AreSharesUpToARounding) {
  const auto outputs = at::full({2, 2}, 0.5);
  for (const char* name : {"binary_crossentropy", "categorical_crossentropy"}) {
    const auto loss_of = [&](double label) { return Loss(name)(at::full({2, 2}, label), outputs); };
    EXPECT_NO_THROW(loss_of(1 + 1e-4));
    EXPECT_NO_THROW(loss_of(-1e-4));
    for (const double label : {1.01, -0.01, HUGE_VAL, -HUGE_VAL, kNaN})
      expect_says(message_of<InvalidArgument>([&] { loss_of(label); }), "a label is ");
  }
}

TEST(Reduce, ValuesOfOtherShapesAreRefused) {
  const MirroredStrategy strategy(2);
  const auto parts = [&](std::int64_t a, std::int64_t b) { return PerReplica<Tensor>({at::ones({a}), at::ones({b})}); };
  EXPECT_EQ(strategy.reduce(ReduceOp::sum, parts(2, 2)).sum().item<double>(), 4);
  expect_says(message_of<InvalidArgument>([&] { strategy.reduce(ReduceOp::sum, parts(2, 1)); }),
              "replica 0's value is Float [2], replica 1's Float [1]; all must have one shape");
}

// --- how often data are read

TEST(Reading, ASourceThatCanBeReadOnceLosesNothing) {
  for (const int replicas : {1, 2}) {
    const MirroredStrategy strategy(replicas);
    const auto scope = strategy.scope();
    const auto once = [](std::int64_t& at) {
      return Dataset::from_generator([&at] {
        return [&at]() -> std::optional<Example> {
          if (at == 40) return std::nullopt;
          const auto i = static_cast<double>(at++);
          return Example{.x = at::full({3}, i), .y = at::full({1}, i)};
        };
      });
    };
    std::int64_t at = 0, maps = 0;
    Sequential model({Dense(1)});
    model.compile({.optimizer = "sgd", .loss = "mse"});
    const auto counted = once(at).map([&](Example example) {
      ++maps;
      return example;
    });
    model.fit(counted.batch(10), {.verbose = 0});
    EXPECT_EQ(model.iterations(), 4);
    EXPECT_EQ(maps, 40);
    at = 0;
    Sequential other({Dense(1)});
    EXPECT_EQ(other.predict(once(at).batch(10)).size(0), 40);
    at = 0;
    Sequential third({Dense(1)});
    third.compile({.loss = "mse"});
    third.fit(once(at).batch(10).prefetch(2), {.verbose = 0, .class_weight = {{0, 1}}});
    EXPECT_EQ(third.iterations(), 4);
    at = 0;
    const auto ones = Dataset::from_tensor_slices(at::ones({4, 3}), at::ones({4, 1})).batch(4);
    const auto logs = third.fit(ones, {.verbose = 0, .validation_data = once(at).batch(10)});
    at = 0;
    EXPECT_NEAR(logs["val_loss"].at(0), third.evaluate(once(at).batch(10))["loss"], 1e-4 * logs["val_loss"].at(0));
  }
}

// Some layers take an example for a batch; a module of the user's own may take both.
TEST(Reading, DataWithoutBatchesAreRefusedForLayersAlone) {
  const auto whole = Dataset::from_tensor_slices(at::ones({4, 3}), at::ones({4, 3}));
  Sequential layers({Dense(3)});
  layers.compile({.loss = "mse"});
  layers.fit(whole.batch(4), {.verbose = 0});
  expect_says(message_of<InvalidArgument>([&] { layers.evaluate(whole); }), "call batch() on the data set first");
  struct Own : torch::nn::Module {
    Own() { weight = register_parameter("weight", at::ones({3})); }
    Tensor forward(const Tensor& x) { return weight * x; }
    Tensor weight;
  };
  Model own([] { return std::make_shared<Own>(); });
  own.compile({.loss = "mse"});
  own.fit(whole.batch(4), {.verbose = 0});
  EXPECT_EQ(own.evaluate(whole)["loss"], own.evaluate(whole.batch(4))["loss"]);
}

// --- what is missing, empty or too much

TEST(Refused, NullCallbacksMetricsLayersAndFunctions) {
  const OneDeviceStrategy strategy("cpu:0");
  const auto scope = strategy.scope();
  const auto data = Dataset::from_tensor_slices(at::ones({4, 3}), at::ones({4, 1})).batch(2);
  Sequential model({Dense(1)});
  model.compile({.loss = "mse"});
  const auto fit = [&] {
    model.fit(data, {.verbose = 0, .callbacks = {EarlyStopping(), std::shared_ptr<EarlyStopping>()}});
  };
  expect_says(message_of<InvalidArgument>(fit), "callback 1 is null");
  EXPECT_THROW(Metric{std::shared_ptr<const MetricFunction>()}, InvalidArgument);
  EXPECT_THROW(Layer{std::shared_ptr<const LayerSpec>()}, InvalidArgument);
  EXPECT_THROW(data.map({}), InvalidArgument);
  EXPECT_THROW(Dataset::from_generator({}), InvalidArgument);
  EXPECT_THROW(Dataset::from_files({"a"}, {}), InvalidArgument);
  const auto same = [](Example example) { return example; };
  expect_says(message_of<InvalidArgument>([&] { data.map(same, {.num_parallel_calls = 1000000}); }), "from 1 to 1024");
  expect_says(message_of<InvalidArgument>([&] { OneDeviceStrategy("cpu:0", 1000000); }),
              "threads_per_replica is 1000000");
}

TEST(Refused, PredictOfNoBatches) {
  const auto x = at::ones({4, 3});
  for (const int replicas : {1, 2}) {
    const MirroredStrategy strategy(replicas);
    const auto scope = strategy.scope();
    Sequential model({Dense(1)});
    model.build({3});
    expect_says(message_of<InvalidArgument>([&] { model.predict(Dataset::from_tensor_slices(x)); }), "call batch()");
    const auto empty =
        Dataset::from_tensor_slices(x).batch(2).map([](Example batch) { return Example{.x = batch.x.slice(0, 0, 0)}; });
    expect_says(message_of<InvalidArgument>([&] { model.predict(empty); }), "no examples");
    expect_says(message_of<InvalidArgument>([&] { model.predict(Dataset::from_tensor_slices(x).take(0).batch(2)); }),
                "empty");
  }
}

}  // namespace
}  // namespace lockstep
