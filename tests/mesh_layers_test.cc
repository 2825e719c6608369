// Keras's layers, buffers, callbacks and errors on meshes.
#include "base/expect_says_testing.h"
#include "meshes.h"

namespace lockstep {
namespace {

struct LayersPlace {
  std::string name;
  Axes axes;
  ModelParallelOptions options = {};
};

void PrintTo(const LayersPlace& place, std::ostream* out) { *out << place.name; }

// Small images, in double precision; the last batch has one less than the others.
Dataset images() {
  torch::manual_seed(7);
  const auto x = torch::randn({23, 1, 8, 8}, torch::kDouble);
  const auto y = torch::randint(3, {23}, torch::kLong);
  return Dataset::from_tensor_slices(x, y).batch(8);
}

Sequential convolutions() {
  Sequential model({Conv2D(4, {3, 3}, {.activation = "relu"}), MaxPooling2D({2, 2}), Flatten(),
                    Dense(16, {.activation = "relu"}), Dropout(0.0), Dense(12, {.activation = "tanh"}), Dense(3)});
  model.compile({.optimizer = Adam({.learning_rate = 1e-2, .global_clipnorm = 1.0}),
                 .loss = SparseCategoricalCrossentropy({.from_logits = true}),
                 .metrics = {"accuracy"}});
  model.build({1, 8, 8}, at::kDouble);
  return model;
}

void fit(Model& model, const Dataset& data, std::vector<AnyCallback> callbacks = {}) {
  model.fit(
      data,
      {.epochs = 4, .verbose = 0, .callbacks = std::move(callbacks), .validation_data = data, .handle_signals = false});
}

class SequentialOnMeshes : public testing::TestWithParam<LayersPlace> {};

TEST_P(SequentialOnMeshes, IsThatOfOneDevice) {
  const auto data = images();
  const auto begin = testing::TempDir() + "/mesh_layers_" + GetParam().name, end = begin + "_end";
  parallel::Parameters expected;
  {
    const OneDeviceStrategy strategy("cpu:0", 1);
    const auto scope = strategy.scope();
    auto model = convolutions();
    model.save_weights(begin);
    fit(model, data);
    expected = whole_weights(model);
  }
  on_mesh(GetParam().axes, GetParam().options, [&](const ModelParallelStrategy&) {
    auto model = convolutions();
    model.load_weights(begin);
    fit(model, data);
    const auto weights = whole_weights(model);
    EXPECT_LT(parallel::largest_difference(weights, expected), 1e-9);
    EXPECT_FALSE(model.summary().empty());
    model.save_weights(end);
  });
  const auto saved = read_archive(end);
  EXPECT_EQ(saved.tensors.size(), expected.size());
}

const LayoutMap kDense{
    {"dense.weight", {"tensor", ""}}, {"dense.bias", {"tensor"}}, {"dense_1.weight", {"", "tensor"}}};

INSTANTIATE_TEST_SUITE_P(Meshes, SequentialOnMeshes,
                         testing::Values(LayersPlace{"tensor2", {{"tensor", 2}}, {.layout_map = kDense}},
                                         LayersPlace{"pipeline2", {{"pipeline", 2}}, {.microbatches = 2}},
                                         LayersPlace{"pipeline1", {{"pipeline", 1}}, {}},
                                         LayersPlace{"shard2", {{"shard", 2}}, {.fully_shard = {.units = {"dense*"}}}},
                                         LayersPlace{"shard2pipeline2tensor2",
                                                     {{"shard", 2}, {"pipeline", 2}, {"tensor", 2}},
                                                     {.layout_map = kDense, .fully_shard = {.units = {"dense*"}}}}),
                         [](const auto& each) { return each.param.name; });

TEST(MeshLayers, TheEmbeddingOfKerasIsDivided) {
  const auto ids = (at::arange(40) * 7).remainder(12).view({10, 4});
  const auto data = Dataset::from_tensor_slices(ids, ids.sum(1).remainder(3)).batch(5);
  const auto path = testing::TempDir() + "/mesh_embedding";
  const auto make = [] {
    Sequential model({Embedding(12, 6), Flatten(), Dense(3)});
    model.compile({.optimizer = "adam", .loss = SparseCategoricalCrossentropy({.from_logits = true})});
    model.build({4}, at::kLong);
    return model;
  };
  parallel::Parameters expected;
  {
    const OneDeviceStrategy strategy("cpu:0", 1);
    const auto scope = strategy.scope();
    auto model = make();
    model.save_weights(path);
    fit(model, data);
    expected = whole_weights(model);
  }
  for (const auto& layout : {std::vector<std::string>{"tensor", ""}, std::vector<std::string>{"", "tensor"}}) {
    on_mesh({{"tensor", 2}}, {.layout_map = {{"embedding.weight", layout}}}, [&](const ModelParallelStrategy&) {
      auto model = make();
      model.load_weights(path);
      fit(model, data);
      EXPECT_LT(parallel::largest_difference(whole_weights(model), expected), 1e-5);
    });
  }
}

// Running statistics are means over all ranks with other examples, and not moved by ranks without any.
TEST(MeshLayers, BuffersAreThoseOfADataAxis) {
  torch::manual_seed(5);
  const auto x = torch::randn({11, 6}, torch::kDouble);
  const auto data = Dataset::from_tensor_slices(x, x.sum(1).gt(0).to(at::kLong)).batch(8);  // then 3 for 4 ranks
  std::map<std::string, double> losses;
  for (const auto& axis : {"data", "shard"}) {
    on_mesh({{axis, 4}}, {}, [&, name = std::string(axis)](const ModelParallelStrategy& strategy) {
      Sequential model(
          {Dense(4, {.kernel_initializer = "ones"}), BatchNormalization(), Dense(2, {.kernel_initializer = "zeros"})});
      model.compile(
          {.optimizer = SGD({.learning_rate = 0.1}), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
      fit(model, data);
      const double loss = model.evaluate(data)["loss"];
      if (strategy.is_chief()) losses[name] = loss;
    });
  }
  EXPECT_NEAR(losses.at("data"), losses.at("shard"), 1e-9);
}

TEST(MeshLayers, TheBestWeightsComeBack) {
  const auto data = make_sequences();
  for (const auto& [axes, options] :
       {std::pair<Axes, ModelParallelOptions>{{{"tensor", 2}}, {.plan = transformer_plan()}},
        std::pair<Axes, ModelParallelOptions>{{{"shard", 2}}, {.fully_shard = {.units = {"1"}}}}}) {
    on_mesh(axes, options, [&](const ModelParallelStrategy&) {
      auto model = make_transformer_model(Adam({.learning_rate = 0.1}));  // too large: the loss goes up again
      const auto history =
          model.fit(data, {.epochs = 8,
                           .verbose = 0,
                           .callbacks = {EarlyStopping({.patience = 20, .restore_best_weights = true})},
                           .validation_data = data,
                           .handle_signals = false});
      const auto& losses = history["val_loss"];
      EXPECT_NEAR(model.evaluate(data)["loss"], *std::min_element(losses.begin(), losses.end()), 1e-9);
    });
  }
}

// A callback throws on one rank alone: the others do not wait for that rank in another Group.
TEST(MeshLayers, WhatOneRankThrowsEndsAll) {
  const auto data = make_sequences();
  const auto start = std::chrono::steady_clock::now();
  for (const auto& [axes, options] :
       {std::pair<Axes, ModelParallelOptions>{{{"tensor", 2}}, {.plan = transformer_plan()}},
        std::pair<Axes, ModelParallelOptions>{{{"data", 2}, {"shard", 2}}, {}}}) {
    on_mesh(axes, options, [&](const ModelParallelStrategy& strategy) {
      auto model = make_transformer_model(Adam({.global_clipnorm = 1.0}));
      struct Throws : Callback {
        explicit Throws(int of) : rank(of) {}
        void on_train_batch_end(std::int64_t batch, const Logs&) override {
          if (batch == 1 && rank == 1) throw Error("this rank throws");
        }
        const int rank;
      };
      const auto message = message_of<Error>([&] { fit(model, data, {Throws(strategy.mesh().ranks().rank())}); });
      expect_says(message, "this rank throws");
    });
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

// Parameters are gathered, and computed with, in 16 bits; what is trained has 32.
TEST(MeshLayers, ShardsOfFloat32AreComputedWithInBfloat16) {
  const auto x = at::sin(at::arange(32 * 6, at::kFloat).view({32, 6}));
  const auto data = Dataset::from_tensor_slices(x, x.sum(1, true)).batch(8);
  set_global_policy("mixed_bfloat16");
  on_mesh({{"shard", 2}}, {.fully_shard = {.units = {"dense*"}, .param_dtype = DType::bfloat16}},
          [&](const ModelParallelStrategy&) {
            Sequential model({Dense(16, {.activation = "tanh"}), Dense(1)});
            model.compile({.optimizer = Adam({.learning_rate = 1e-2}), .loss = "mse"});
            const auto losses = model.fit(data, {.epochs = 10, .verbose = 0, .handle_signals = false}).history["loss"];
            EXPECT_LT(losses.back(), 0.5 * losses.front());
            for (const auto& [name, value] : whole_weights(model)) EXPECT_EQ(value.scalar_type(), at::kFloat) << name;
          });
  set_global_policy("float32");
}

// A stage of two layers, whose product is in 16 bits.
struct HalfPrecisionImpl : torch::nn::Module {
  HalfPrecisionImpl(std::int64_t inputs, std::int64_t outputs) {
    layer = register_module("layer", torch::nn::Linear(inputs, outputs));
    for (const auto& parameter : layer->parameters()) {
      const at::NoGradGuard no_gradient;
      parameter.copy_(at::sin(at::arange(parameter.numel(), at::kFloat)).view_as(parameter) * 0.3);
    }
  }
  Tensor forward(const Tensor& x) {
    const auto y = layer(x);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    return torch::tanh(y);
  }
  torch::nn::Linear layer = nullptr;
};

TEST(MeshLayers, StagesComputeInBfloat16) {
  const auto x = at::sin(at::arange(32 * 6, at::kFloat).view({32, 6}));
  const auto data = Dataset::from_tensor_slices(x, x.sum(1, true).tanh()).batch(8);
  set_global_policy("mixed_bfloat16");
  const auto fitted = [&] {
    Model model(std::vector<PipelineStage>{[] { return std::make_shared<HalfPrecisionImpl>(6, 16); },
                                           [] { return std::make_shared<HalfPrecisionImpl>(16, 1); }});
    model.compile({.optimizer = Adam({.learning_rate = 1e-2}), .loss = "mse"});
    const auto losses = model.fit(data, {.epochs = 10, .verbose = 0, .handle_signals = false}).history["loss"];
    EXPECT_EQ(model.predict(data).scalar_type(), at::kFloat);
    EXPECT_LT(losses.back(), 0.5 * losses.front());
    return losses;
  };
  const auto expected = [&] {
    const OneDeviceStrategy strategy("cpu:0", 1);
    const auto scope = strategy.scope();
    return fitted();
  }();
  for (const MakePipelineSchedule schedule : {schedules::one_forward_one_backward, schedules::zero_bubble}) {
    on_mesh({{"pipeline", 2}}, {.schedule = schedule, .microbatches = 4}, [&](const ModelParallelStrategy&) {
      const auto losses = fitted();
      for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[i], 0.03 * expected[0]);
    });
  }
  set_global_policy("float32");
}

}  // namespace
}  // namespace lockstep
