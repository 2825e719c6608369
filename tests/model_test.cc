// Tests what a Model tells its user: copies that went apart, the trained module, messages and warnings.
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <ATen/ATen.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <sstream>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"

namespace lockstep {
namespace {

// An optimizer of torch::optim on one replica's parameters.
TEST(ModelSays, CopiesThatGoApartAreNamed) {
  const MirroredStrategy strategy(2);
  const auto scope = strategy.scope();
  const auto data = Dataset::from_tensor_slices(at::ones({8, 2}), at::ones({8, 1})).batch(4);
  Sequential model({Dense(1)});
  model.compile({.optimizer = SGD({.learning_rate = 1e-3}), .loss = "mse"});
  model.fit(data, {.epochs = 2, .verbose = 0});
  {
    const at::NoGradGuard no_grad;
    model.module<torch::nn::Module>()->parameters()[0].add_(0.5);
  }
  constexpr const char* kSays = "\"dense.weight\" of replica 1 is not that of replica 0";
  expect_says(message_of<InvalidArgument>([&] { model.evaluate(data); }), kSays);
  const auto file = fresh_folder("replicas", "apart").string() + "/weights";
  testing::internal::CaptureStderr();
  model.save_weights(file);
  expect_says(testing::internal::GetCapturedStderr(), kSays);
}

struct OwnNet : torch::nn::Module {
  OwnNet() { linear = register_module("linear", torch::nn::Linear(2, 1)); }
  Tensor forward(const Tensor& x) { return linear(x); }
  torch::nn::Linear linear = nullptr;
};

TEST(ModelSays, TheTrainedModuleComesBack) {
  const MirroredStrategy strategy(2);
  const auto scope = strategy.scope();
  const auto x = at::rand({8, 2});
  Model model([] { return std::make_shared<OwnNet>(); });
  model.compile({.optimizer = SGD({.learning_rate = 0.1}), .loss = "mse"});
  model.fit(Dataset::from_tensor_slices(x, x.sum(1, true)).batch(4), {.verbose = 0});
  const auto net = model.module<OwnNet>();
  EXPECT_TRUE(at::allclose(net->forward(x), model.predict(Dataset::from_tensor_slices(x).batch(8))));
  std::stringstream file;
  torch::save(net, file);
  auto again = std::make_shared<OwnNet>();
  torch::load(again, file);
  EXPECT_TRUE(at::equal(again->forward(x), net->forward(x)));
  EXPECT_THROW(model.module<torch::nn::LinearImpl>(), InvalidArgument);
}

TEST(ModelSays, OneExampleUnderBatchNormSaysWhatToDo) {
  struct Net : torch::nn::Module {
    Net() { norm = register_module("norm", torch::nn::BatchNorm1d(2)); }
    Tensor forward(const Tensor& x) { return norm(x); }
    torch::nn::BatchNorm1d norm = nullptr;
  };
  Model model([] { return std::make_shared<Net>(); });
  model.compile({.optimizer = SGD(), .loss = "mse"});
  try {
    model.fit(Dataset::from_tensor_slices(at::rand({5, 2}), at::rand({5, 2})).batch(4), {.verbose = 0});
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("drop_remainder"), std::string::npos) << error.what();
  }
}

TEST(ModelSays, BatchNormsStatisticsAreNonTrainableParameters) {
  Sequential model({Dense(4), BatchNormalization()});
  model.build({2});
  EXPECT_NE(model.summary().find("Non-trainable params: 8"), std::string::npos) << model.summary();
  EXPECT_NE(model.summary().find("Total params: 28"), std::string::npos) << model.summary();
}

std::string warnings_of(const std::function<void()>& act) {
  testing::internal::CaptureStderr();
  act();
  return testing::internal::GetCapturedStderr();
}

TEST(ModelSays, ImagesWithTheirChannelsLastAreWarnedOf) {
  const auto built = [](const std::vector<std::int64_t>& image) {
    return warnings_of([&] { Sequential({Conv2D(4, 3)}).build(image); });
  };
  EXPECT_NE(built({28, 28, 3}).find("channels last"), std::string::npos);
  EXPECT_EQ(built({3, 28, 28}), "");
  EXPECT_EQ(built({64, 7, 7}), "");
}

// Two processes of a launcher, of which each would train a model of its own.
// A difference of [batch] and [batch, 1] would be [batch, batch], and its mean trains something else.
TEST(ModelSays, ALambdaLossTakesLabelsWithADimensionMoreOrLess) {
  const auto x = at::randn({12, 3}), column = x.sum(1, true);
  const Loss loss = [](const Tensor& y_true, const Tensor& y_pred) { return (y_true - y_pred).square(); };
  for (const auto& y_true : {column, column.squeeze(-1)}) {
    for (const auto& y_pred : {column * 2, column.squeeze(-1) * 2}) {
      EXPECT_FLOAT_EQ(loss(y_true, y_pred).item<float>(), column.square().mean().item<float>())
          << y_true.sizes() << y_pred.sizes();
    }
  }
}

TEST(ModelSays, ClassWeightsOfOneHotLabelsAreThoseOfTheirClasses) {
  const auto x = at::randn({26, 6}, at::kDouble);
  const auto classes = at::arange(26, at::kLong).remainder(3), one_hot = at::one_hot(classes, 3).to(at::kDouble);
  const auto trained = [&](const Tensor& y, const Loss& loss) {
    const MirroredStrategy strategy(2);
    const auto scope = strategy.scope();
    set_random_seed(2);
    Sequential model({Dense(3)});
    model.compile({.optimizer = SGD({.learning_rate = 0.5}), .loss = loss});
    model.build({6}, at::kDouble);
    model.fit(Dataset::from_tensor_slices(x, y).batch(7), {.verbose = 0, .class_weight = {{0, 2.0}, {2, 0.5}}});
    return model.predict(Dataset::from_tensor_slices(x).batch(26));
  };
  const auto by_class = trained(classes, SparseCategoricalCrossentropy({.from_logits = true}));
  const auto by_vector = trained(one_hot, CategoricalCrossentropy({.from_logits = true}));
  EXPECT_LE((by_class - by_vector).abs().max().item<double>(), 1e-12);
}

// Tensors of InferenceMode have no part in autograd, and come by other ways through LibTorch's dispatcher.
TEST(ModelSays, InferenceModeGivesTheSameAndTrainingGoesOnAfterIt) {
  const auto images = at::randn({8, 1, 12, 12});
  const auto labels = at::arange(8, at::kLong).remainder(4);
  set_random_seed(2);
  Sequential model({Conv2D(4, 3, {.activation = "relu"}), MaxPooling2D(), BatchNormalization(), Flatten(),
                    Dense(16, {.activation = "relu"}), Dropout(0.5), Dense(4)});
  model.compile({.optimizer = "sgd", .loss = SparseCategoricalCrossentropy({.from_logits = true})});
  const auto data = Dataset::from_tensor_slices(images, labels).batch(8);
  model.fit(data, {.verbose = 0});
  const auto expected = model.predict(data);
  {
    const c10::InferenceMode inference;
    const auto inside = Dataset::from_tensor_slices(images.clone(), labels.clone()).batch(8);
    EXPECT_TRUE(at::equal(model.predict(inside), expected));
    EXPECT_EQ(model.evaluate(inside)["loss"], model.evaluate(data)["loss"]);
  }
  model.fit(data, {.verbose = 0});
  EXPECT_FALSE(at::equal(model.predict(data), expected));
}

TEST(ModelSays, CopiesOfAProgramAreWarnedOf) {
  const std::map<std::string, std::string> variables{{"LOCKSTEP_RANK", "1"},       {"LOCKSTEP_SIZE", "2"},
                                                     {"LOCKSTEP_LOCAL_RANK", "1"}, {"LOCKSTEP_LOCAL_SIZE", "2"},
                                                     {"LOCKSTEP_HOST", "h"},       {"LOCKSTEP_STORE", "127.0.0.1:1"}};
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  const auto warnings = warnings_of([] {
    Sequential model({Dense(1)});
    model.compile({.optimizer = SGD(), .loss = "mse"});
    model.fit(Dataset::from_tensor_slices(at::ones({4, 2}), at::ones({4, 1})).batch(4), {.verbose = 0});
  });
  for (const auto& [name, value] : variables) unsetenv(name.c_str());
  EXPECT_NE(warnings.find("trains a model of its own"), std::string::npos) << warnings;
}

// Somebody removes the folder of the logs while the model trains.
TEST(ModelSays, ATensorBoardFolderThatWasRemovedIsMadeAgain) {
  const auto folder = fresh_folder("model", "removed_logs");
  Sequential model({Dense(1)});
  model.compile({.optimizer = SGD(), .loss = "mse"});
  const auto remove = LambdaCallback({.on_epoch_begin = [&](int epoch) {
    if (epoch == 1) std::filesystem::remove_all(folder);
  }});
  const auto warnings = warnings_of([&] {
    model.fit(Dataset::from_tensor_slices(at::ones({4, 2}), at::ones({4, 1})).batch(4),
              {.epochs = 4, .verbose = 0, .callbacks = {remove, TensorBoard(folder.string())}});
  });
  expect_says(warnings, "was removed; it goes on in a new file");
  std::size_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "train")) bytes += entry.file_size();
  EXPECT_GT(bytes, 100U);  // of the epochs after that
}

}  // namespace
}  // namespace lockstep
