// Estimator against a plain fit: steps, checkpoints, going on, evaluation, prediction.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <lockstep/estimator.h>
#include <lockstep/lockstep.h>

#include <filesystem>
#include <set>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "tests/workers.h"

namespace lockstep {
namespace {

constexpr std::int64_t kBatch = 7;  // 4 batches

EstimatorSpec model_fn(const Example& /*features*/, ModeKeys mode, const Params& params) {
  EstimatorSpec spec{.model = Sequential({Dense(9, {.activation = "tanh"}), Dropout(0.2), Dense(3)})};
  spec.loss = SparseCategoricalCrossentropy({.from_logits = true});
  spec.eval_metric_ops = {"accuracy"};
  spec.predictions = [](const Tensor& outputs) {
    return Predictions{{"classes", outputs.argmax(1)}, {"logits", outputs}};
  };
  if (mode == ModeKeys::train) spec.optimizer = Adam({.learning_rate = params.at("learning_rate")});
  return spec;
}

// Drawn once, from the generator that all threads share.
const Dataset& examples() {
  static const auto data = make_data(at::kDouble);
  return data;
}
Dataset data() { return examples().shuffle(26, {.seed = 3}).batch(kBatch); }
Dataset endless() { return examples().shuffle(26, {.seed = 3}).repeat().batch(kBatch); }

RunConfig config_of(const std::string& folder, std::int64_t save_checkpoints_steps = 0) {
  return {.model_dir = folder, .save_checkpoints_steps = save_checkpoints_steps, .log_step_count_steps = 0};
}

Estimator make_estimator(const RunConfig& config) { return Estimator(model_fn, config, {{"learning_rate", 0.05}}); }

std::string fresh(const std::string& name) { return fresh_folder("estimator", name).string(); }

std::set<std::string> checkpoints_in(const std::string& folder) {
  std::set<std::string> found;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    if (file.path().extension() == ".safetensors") found.insert(file.path().stem());
  }
  return found;
}

// The weights of the latest checkpoint.
Archive weights_in(const Estimator& estimator) {
  auto archive = read_archive(estimator.latest_checkpoint());
  std::erase_if(archive.tensors, [](const auto& entry) { return entry.first.find('/') != std::string::npos; });
  return archive;
}

bool equal_weights(const Estimator& a, const Estimator& b) {
  const auto one = weights_in(a), other = weights_in(b);
  EXPECT_EQ(one.tensors.size(), 4);
  for (const auto& [name, tensor] : one.tensors) {
    if (tensor.bytes != other.tensor(name).bytes) return false;
  }
  return true;
}

TEST(Estimator, TrainsEvaluatesAndPredictsLikeAModel) {
  auto estimator = make_estimator(config_of(fresh("like")));
  estimator.train(data).train(data);  // two passes over the data

  const auto scope = OneDeviceStrategy().scope();
  set_random_seed(1);
  const auto features = data().iterate().next();
  auto spec = model_fn(*features, ModeKeys::train, {{"learning_rate", 0.05}});
  spec.model.compile({.optimizer = *spec.optimizer, .loss = *spec.loss, .metrics = {"accuracy"}});
  spec.model.fit(data(), {.epochs = 2, .verbose = 0});
  const auto expected = spec.model.evaluate(data());

  const auto result = estimator.evaluate(data);
  EXPECT_EQ(result["global_step"], 8);
  EXPECT_EQ(result["loss"], expected["loss"]);
  EXPECT_EQ(result["accuracy"], expected["accuracy"]);
  const auto ordered = [] { return examples().batch(kBatch); };
  const auto predictions = estimator.predict(ordered);
  EXPECT_TRUE(at::equal(predictions.at("logits"), spec.model.predict(ordered())));
  EXPECT_TRUE(at::equal(predictions.at("classes"), predictions.at("logits").argmax(1)));
  EXPECT_EQ(estimator.predict(ordered, {.predict_keys = {"classes"}}).size(), 1);
  expect_says(message_of([&] { estimator.predict(ordered, {.predict_keys = {"class"}}); }),
              "there are classes, logits");
}

TEST(Estimator, StepsMaxStepsAndWhereItGoesOn) {
  for (const auto& input : {InputFn(data), InputFn(endless)}) {
    auto whole = make_estimator(config_of(fresh("whole")));
    whole.train(endless, {.steps = 7});
    EXPECT_EQ(whole.evaluate(data)["global_step"], 7);
    auto parts = make_estimator(config_of(fresh("parts")));
    parts.train(endless, {.steps = 3}).train(endless, {.steps = 4});
    EXPECT_TRUE(equal_weights(whole, parts));
    parts.train(input, {.max_steps = 7});
    EXPECT_EQ(parts.evaluate(data)["global_step"], 7);
    parts.train(input, {.max_steps = 9});
    EXPECT_EQ(parts.evaluate(data)["global_step"], 9);
    parts.train(input, {.hooks = {StopAtStepHook({.num_steps = 1})}});
    EXPECT_EQ(parts.evaluate(data)["global_step"], 10);
  }
  auto once = make_estimator(config_of(fresh("once")));
  once.train(data, {.steps = 4});  // all the data
  once.train(data, {.steps = 2});  // they begin again
  EXPECT_EQ(once.evaluate(data)["global_step"], 6);
  once.train(data, {.steps = 100});  // they end
  EXPECT_EQ(once.evaluate(data)["global_step"], 8);
}

TEST(Estimator, KeepsTheLastCheckpointsAndGoesOnAfterAFailure) {
  auto whole = make_estimator(config_of(fresh("kept_whole"), 2));
  whole.train(data).train(data).train(data);
  EXPECT_EQ(checkpoints_in(whole.model_dir()),
            (std::set<std::string>{"model.ckpt-4", "model.ckpt-6", "model.ckpt-8", "model.ckpt-10", "model.ckpt-12"}));

  const auto folder = fresh("kept_failed");
  auto failing = make_estimator(config_of(folder, 2));
  failing.train(data);
  int steps = 0;
  const LambdaCallback fails({.on_train_batch_begin = [&](std::int64_t) {
    if (++steps == 4) throw Error("the machine was lost");
  }});
  EXPECT_THROW(failing.train(data, {.hooks = {fails}}), Error);
  auto resumed = make_estimator(config_of(folder, 2));
  resumed.train(data, {.max_steps = 8}).train(data);
  EXPECT_EQ(resumed.evaluate(data)["global_step"], 12);
  EXPECT_TRUE(equal_weights(whole, resumed));
}

TEST(Estimator, TrainAndEvaluateEvaluatesEachCheckpoint) {
  auto estimator = make_estimator(config_of(fresh("both"), 5));
  const auto result = train_and_evaluate(estimator, {.input_fn = endless, .max_steps = 12},
                                         {.input_fn = data, .steps = 0, .name = "test", .throttle_secs = 0});
  EXPECT_EQ(result["global_step"], 12);
  int files = 0;
  for ([[maybe_unused]] const auto& file : std::filesystem::directory_iterator(estimator.model_dir() + "/eval_test"))
    ++files;
  EXPECT_EQ(files, 3);  // at steps 5, 10 and 12
  auto plain = make_estimator(config_of(fresh("plain")));
  plain.train(endless, {.max_steps = 12});
  EXPECT_TRUE(equal_weights(estimator, plain));  // evaluation changes nothing
}

TEST(Estimator, UnderStrategiesOfSeveralReplicasAndWorkers) {
  // Workers that are threads share the program's seeds, so that initial values come from the first one's checkpoint.
  const auto initial = fresh("alone") + "/model.ckpt-0";
  const auto without_dropout = [initial](const Example&, ModeKeys mode, const Params&) {
    EstimatorSpec spec{.model = Sequential({Dense(9, {.activation = "tanh"}), Dense(3)})};
    if (std::filesystem::exists(checkpoint_file(initial))) spec.model.load_weights(initial);
    spec.loss = SparseCategoricalCrossentropy({.from_logits = true});
    if (mode == ModeKeys::train) spec.optimizer = Adam({.learning_rate = 0.05});
    return spec;
  };
  Estimator alone(without_dropout, config_of(std::filesystem::path(initial).parent_path()));
  alone.train(endless, {.steps = 6});
  const auto expected = alone.evaluate(data);
  const auto distributed = [&](const Strategy& strategy, const std::string& folder) {
    auto config = config_of(folder, 3);
    config.train_distribute = strategy;
    Estimator estimator(without_dropout, config);
    estimator.train(endless, {.steps = 4}).train(endless, {.max_steps = 6});
    const auto result = estimator.evaluate(data);
    EXPECT_EQ(result["global_step"], 6);
    EXPECT_NEAR(result["loss"], expected["loss"], 1e-9);
  };
  distributed(MirroredStrategy({.devices = {"cpu:0", "cpu:1"}}), fresh("mirrored"));
  const auto folder = fresh("workers");
  expect_no_errors(run_workers({.workers = 2}, [&](const MultiWorkerMirroredStrategy& strategy) {
    distributed(strategy, strategy.is_chief() ? folder : "");
  }));
  EXPECT_EQ(checkpoints_in(folder),
            (std::set<std::string>{"model.ckpt-0", "model.ckpt-3", "model.ckpt-4", "model.ckpt-6"}));
}

TEST(Estimator, HooksMayComeAndGoBetweenTrainings) {
  auto estimator = make_estimator(config_of(fresh("hooks")));
  const auto stopping = [] { return EarlyStopping({.monitor = "loss", .patience = 3}); };
  estimator.train(data, {.steps = 3});
  estimator.train(data, {.steps = 3, .hooks = {stopping()}});
  estimator.train(data, {.max_steps = 8, .hooks = {stopping(), TerminateOnNaN()}});
  estimator.train(data);
  EXPECT_EQ(estimator.evaluate(data)["global_step"], 12);
}

TEST(Estimator, ACopyOfItsFolderIsItsOwn) {
  const auto first = fresh("first"), copy = fresh("copy");
  auto original = make_estimator(config_of(first, 1));
  original.train(endless, {.steps = 6});
  const auto before = checkpoints_in(first);
  std::filesystem::copy(first, copy, std::filesystem::copy_options::recursive);
  auto copied = make_estimator(config_of(copy, 1));
  copied.train(endless, {.steps = 6});
  EXPECT_EQ(checkpoints_in(first), before);
  EXPECT_EQ(checkpoints_in(copy).size(), 5);
  EXPECT_EQ(copied.evaluate(data)["global_step"], 12);
}

TEST(Estimator, GoesOnFromAnOlderCheckpointWhereTheLatestIsGone) {
  auto estimator = make_estimator(config_of(fresh("gone"), 2));
  estimator.train(endless, {.steps = 6});
  std::filesystem::remove(checkpoint_file(estimator.latest_checkpoint()));
  EXPECT_EQ(estimator.evaluate(data)["global_step"], 4);
  estimator.train(endless, {.max_steps = 7});
  EXPECT_EQ(estimator.evaluate(data)["global_step"], 7);
}

TEST(Estimator, AStepWhoseGradientsAreNotFiniteDoesNotCount) {
  int calls = 0;
  Estimator estimator(
      [&](const Example& features, ModeKeys mode, const Params& params) {
        auto spec = model_fn(features, mode, params);
        spec.loss = Loss("first infinite", [&](const Tensor& y, const Tensor& outputs) {
          const auto loss = at::cross_entropy_loss(outputs, y, {}, at::Reduction::None);
          return calls++ == 0 ? loss / 0 : loss;
        });
        if (mode == ModeKeys::train) spec.optimizer = LossScaleOptimizer(*spec.optimizer);
        return spec;
      },
      config_of(fresh("finite")), {{"learning_rate", 0.05}});
  estimator.train(endless, {.steps = 1});
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(estimator.evaluate(data)["global_step"], 1);
}

TEST(Estimator, ATemporaryFolderGoesWithTheEstimator) {
  std::string folder;
  {
    auto estimator = make_estimator({});
    folder = estimator.model_dir();
    estimator.train(data, {.steps = 1});
    EXPECT_TRUE(std::filesystem::exists(folder));
  }
  EXPECT_FALSE(std::filesystem::exists(folder));
}

TEST(Estimator, BadInput) {
  expect_says(message_of([] { make_estimator({.save_checkpoints_steps = -1}); }), "save_checkpoints_steps is -1");
  auto estimator = make_estimator(config_of(fresh("bad")));
  expect_says(message_of([&] { estimator.evaluate(data); }), "there is no checkpoint in");
  expect_says(message_of([&] { estimator.train(endless); }), "give steps or max_steps");
  expect_says(message_of([&] { estimator.train(data, {.steps = 1, .max_steps = 2}); }),
              "both steps (1) and max_steps (2)");
  expect_says(message_of([&] { estimator.train([] { return data().take(0); }); }), "data are empty");
  expect_says(message_of([] { StopAtStepHook({}); }), "exactly one must be given");
  expect_says(message_of([] { Estimator{ModelFn()}; }), "model_fn is empty");
  expect_says(message_of([&] { train_and_evaluate(estimator, {.input_fn = data}, {}); }),
              "EvalSpec's input_fn is empty");
  expect_says(message_of([] { Params({{"rate", 1.0}}).at("rat"); }), "there is no \"rat\"; there are rate");
  expect_says(message_of([&] { estimator.train([] { return examples(); }, {.steps = 1}); }),
              "call batch() on it first");
  const auto kept = std::make_shared<std::optional<EstimatorSpec>>();
  Estimator keeping(
      [kept](const Example& features, ModeKeys mode, const Params& params) {
        if (!*kept) kept->emplace(model_fn(features, mode, params));
        return **kept;
      },
      config_of(fresh("keeping")), {{"learning_rate", 0.05}});
  keeping.train(data, {.steps = 1});
  expect_says(message_of([&] { keeping.evaluate(data); }), "did not make in this call");
  Estimator without_loss(
      [](const Example&, ModeKeys, const Params&) { return EstimatorSpec{.model = Sequential({Dense(3)})}; },
      config_of(fresh("bad")));
  expect_says(message_of([&] { without_loss.train(data, {.steps = 1}); }), "for train has no loss");
}

}  // namespace
}  // namespace lockstep
