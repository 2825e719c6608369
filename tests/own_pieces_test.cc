// Pieces of one's own, and layers made of others: each trains, alone and on replicas.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <filesystem>

#include "gradient/replicated_parameters.h"
#include "strategy/unwrap.h"

namespace lockstep {
namespace {

Dataset line_data() {
  const auto x = at::linspace(-1, 1, 20).view({20, 1});
  return Dataset::from_tensor_slices(x, x * 2 + 1).batch(4);
}

// A layer that infers its size: one factor a feature.
class ScaleSpec final : public LayerSpec {
 public:
  std::string kind() const override { return "scale"; }
  BuiltLayer build(const Tensor& input) const override {
    struct Module : torch::nn::Module {
      explicit Module(std::int64_t size) { factor = register_parameter("factor", at::ones({size})); }
      Tensor factor;
    };
    auto module = std::make_shared<Module>(input.size(-1));
    return {module, [module](const Tensor& x) { return x * module->factor; }};
  }
};

TEST(OwnPieces, LayersOfEveryKindTrain) {
  for (const int replicas : {1, 2}) {
    set_random_seed(1);
    const MirroredStrategy strategy(replicas);
    const auto scope = strategy.scope();
    Sequential inner({Dense(4), ModuleLayer([] { return torch::nn::PReLU(); })});
    Sequential model({Layer(inner), Layer(std::make_shared<ScaleSpec>()), Dense(1)});
    model.compile({.optimizer = Adam({.learning_rate = 0.05}), .loss = "mse"});
    model.fit(line_data(), {.epochs = 80, .verbose = 0});
    EXPECT_LT(model.evaluate(line_data())["loss"], 0.01);
    const auto summary = model.summary();
    for (const char* part : {"sequential (sequential)", "scale (scale)", "(None, 4)", "Total params: 18"}) {
      EXPECT_NE(summary.find(part), std::string::npos) << part << "\n" << summary;
    }
  }
}

TEST(OwnPieces, LabelsWithoutTheLastDimensionMeanTheSame) {
  const auto x = at::linspace(-1, 1, 20).view({20, 1});
  const Loss cube("cube",
                  [](const Tensor& y_true, const Tensor& y_pred) { return (y_true - y_pred).abs().pow(3).mean(-1); });
  std::vector<double> losses;
  for (const auto& y : {x * 2, (x * 2).squeeze(1)}) {
    set_random_seed(1);
    Sequential model({Dense(1)});
    model.compile({.loss = cube});
    losses.push_back(model.fit(Dataset::from_tensor_slices(x, y).batch(4), {.epochs = 3, .verbose = 0})["loss"].back());
  }
  EXPECT_EQ(losses[0], losses[1]);
}

TEST(OwnPieces, ALossThatDoesNotFitTheBatchIsAnError) {
  Sequential model({Dense(1)});
  model.compile(
      {.loss = Loss("wrong", [](const Tensor& y_true, const Tensor& y_pred) { return (y_true - y_pred).mean(0); })});
  EXPECT_THROW(model.fit(line_data(), {.verbose = 0}), InvalidArgument);
}

struct SparseImpl : torch::nn::Module {
  SparseImpl() {
    table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true)));
  }
  Tensor forward(const Tensor& x) { return table(x); }
  torch::nn::Embedding table = nullptr;
};

TEST(OwnPieces, SparseGradientsGiveTheDenseUpdate) {
  const auto train = [](int replicas, bool sparse) {
    set_random_seed(3);
    const MirroredStrategy strategy(replicas);
    const auto scope = strategy.scope();
    Model model([sparse] {
      auto module = std::make_shared<SparseImpl>();
      module->table->options.sparse(sparse);
      return module;
    });
    model.compile(
        {.optimizer = SGD({.learning_rate = 0.5}), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
    const auto x = at::arange(7) % 5;
    model.fit(Dataset::from_tensor_slices(x, x % 3).batch(4), {.epochs = 3, .verbose = 0});
    return unwrap(model.module()).parameter(0, 0).detach().clone();
  };
  const auto dense = train(1, false);
  for (const int replicas : {1, 2}) EXPECT_TRUE(at::allclose(train(replicas, true), dense));
}

struct MaskedImpl : torch::nn::Module {
  MaskedImpl() {
    linear = register_module("linear", torch::nn::Linear(1, 1));
    mask = register_buffer("mask", at::ones({1}, at::kBool));
  }
  Tensor forward(const Tensor& x) { return linear(x) * mask; }
  torch::nn::Linear linear = nullptr;
  Tensor mask;
};

TEST(OwnPieces, AFullCheckpointOfAnyModuleGoesOnWithTheSameBits) {
  const auto path = (std::filesystem::path(LOCKSTEP_BINARY_DIR) / "own_pieces" / "full").string();
  const MirroredStrategy strategy(2);
  const auto scope = strategy.scope();
  const auto make = [] {
    Model model([] { return std::make_shared<MaskedImpl>(); });
    model.compile({.optimizer = Adam({.learning_rate = 0.1}), .loss = "mse"});
    return model;
  };
  auto model = make();
  model.fit(line_data().shuffle(5), {.epochs = 2, .verbose = 0});
  model.save_checkpoint(path);
  auto again = make();
  again.load_checkpoint(path);
  const auto batch = *line_data().iterate().next();
  model.train_on_batch(batch);
  again.train_on_batch(batch);
  EXPECT_EQ(again.iterations(), 11);
  EXPECT_TRUE(at::equal(model.predict(line_data()), again.predict(line_data())));
  model.save_weights(path + "_weights");
  EXPECT_THROW(again.load_checkpoint(path + "_weights"), InvalidArgument);
}

TEST(OwnPieces, TwoFitsGoOnAsOne) {
  const auto run = [](std::vector<std::pair<int, int>> fits) {
    set_random_seed(5);
    Sequential model({Dense(1)});
    model.compile({.loss = "mse"});
    const auto x = at::linspace(-1, 1, 20).view({20, 1});
    const auto data = Dataset::from_tensor_slices(x, x * 3).shuffle(20).batch(3);
    for (const auto& [initial, epochs] : fits)
      model.fit(data, {.epochs = epochs, .verbose = 0, .initial_epoch = initial});
    return model.predict(Dataset::from_tensor_slices(x).batch(20));
  };
  EXPECT_TRUE(at::equal(run({{0, 4}}), run({{0, 2}, {2, 4}})));
}

TEST(OwnPieces, ThawedParametersTrainAfterCompile) {
  Model model([] { return torch::nn::Linear(1, 1); });
  auto& linear = unwrap(model.module()).module(0);
  for (auto& parameter : linear.parameters()) parameter.set_requires_grad(false);
  model.compile({.loss = "mse"});
  EXPECT_THROW(model.fit(line_data(), {.verbose = 0}), InvalidArgument);
  for (auto& parameter : linear.parameters()) parameter.set_requires_grad(true);
  const auto before = linear.parameters()[0].detach().clone();
  model.compile({.loss = "mse"});
  model.fit(line_data(), {.verbose = 0});
  EXPECT_FALSE(at::equal(linear.parameters()[0], before));
}

TEST(OwnPieces, AGeneratorIsNotAskedAgainAfterItsEnd) {
  const auto data = Dataset::from_generator([]() -> Dataset::Generator {
    return [next = 0]() mutable -> std::optional<Example> {
      if (next++ == 10) return std::nullopt;
      return Example{at::ones({1}), at::ones({1})};
    };
  });
  auto iterator = data.batch(4).iterate();
  for (const std::int64_t size : {4, 4, 2}) EXPECT_EQ(iterator.next()->size(), size);
  EXPECT_FALSE(iterator.next());
  EXPECT_FALSE(iterator.next());
}

// A GAN's step: the second optimizer's backward leaves gradients in the first one's module, which zero_grad clears.
TEST(OwnPieces, TwoOptimizersOnOneGraphAreThoseOfAPlainLoop) {
  const auto x = at::randn({12, 3}, at::kDouble), noise = at::randn({12, 2}, at::kDouble);
  const auto linear = [](int from, int to) {
    torch::nn::Linear net(from, to);
    net->to(at::kDouble);
    return net;
  };
  constexpr int kSteps = 20;
  const auto step = [](torch::nn::Linear& draw, torch::nn::Linear& judge, const Tensor& real, const Tensor& seeds,
                       const auto& first, const auto& second) {
    const auto drawn = draw(seeds);
    first(((judge(real) - 1).square() + judge(drawn.detach()).square()).sum());
    second((judge(drawn) - 1).square().sum());
    judge->zero_grad();
  };

  set_random_seed(4);
  const MirroredStrategy strategy(2);
  auto draw = strategy.replicate([&] { return linear(2, 3); });
  auto judge = strategy.replicate([&] { return linear(3, 1); });
  auto plain_draw = linear(2, 3), plain_judge = linear(3, 1);
  const auto copy = [](const torch::nn::Linear& from, const torch::nn::Linear& to) {
    const at::NoGradGuard no_gradient;
    to->weight.copy_(from->weight);
    to->bias.copy_(from->bias);
  };
  copy(draw[0], plain_draw);
  copy(judge[0], plain_judge);
  torch::optim::SGD for_draw(plain_draw->parameters(), 0.05), for_judge(plain_judge->parameters(), 0.05);
  const auto by = [](torch::optim::SGD& optimizer) {
    return [&optimizer](const Tensor& loss) {
      optimizer.zero_grad();
      (loss / 12).backward();
      optimizer.step();
    };
  };
  for (int i = 0; i < kSteps; ++i) step(plain_draw, plain_judge, x, noise, by(for_judge), by(for_draw));

  const auto draws = strategy.optimizer(SGD({.learning_rate = 0.05}), draw);
  const auto judges = strategy.optimizer(SGD({.learning_rate = 0.05}), judge);
  const auto data = strategy.distribute(Dataset::from_tensor_slices(x, noise).batch(12).repeat(kSteps));
  for (auto& batch : data) {
    strategy.run(
        [&](ReplicaContext& replica, torch::nn::Linear& own_draw, torch::nn::Linear& own_judge, const Example& part) {
          const auto minimize = [&](const ReplicatedOptimizer& optimizer) {
            return [&](const Tensor& loss) { optimizer.minimize(replica, loss, static_cast<double>(part.size())); };
          };
          step(own_draw, own_judge, part.x, part.y, minimize(judges), minimize(draws));
        },
        draw, judge, batch);
  }
  EXPECT_LE((draw[1]->weight - plain_draw->weight).abs().max().item<double>(), 1e-9);
  EXPECT_LE((judge[0]->weight - plain_judge->weight).abs().max().item<double>(), 1e-9);
}

TEST(OwnPieces, StrategiesDoNotMix) {
  const MirroredStrategy two(2), three(3);
  auto net = two.replicate([] { return torch::nn::Linear(1, 1); });
  EXPECT_THROW(three.run([](ReplicaContext&, torch::nn::Linear&) {}, net), InvalidArgument);
  EXPECT_THROW(two.run([&](ReplicaContext&) { two.run([](ReplicaContext&) {}); }), InvalidArgument);
}

// Deviations and bounds of the initial values that Keras documents, for a weight of 60 outputs and 40 inputs.
TEST(Initializers, HaveKerasDistributions) {
  struct Case {
    const char* name;
    double deviation, bound;
  };
  const auto uniform = [](const char* name, double variance) {
    return Case{name, std::sqrt(variance), std::sqrt(3 * variance)};
  };
  const auto truncated = [](const char* name, double variance) {
    return Case{name, std::sqrt(variance), 2 * std::sqrt(variance) / 0.87962566103423978};
  };
  for (const auto& c :
       {uniform("glorot_uniform", 2.0 / 100), uniform("he_uniform", 2.0 / 40), uniform("lecun_uniform", 1.0 / 40),
        truncated("glorot_normal", 2.0 / 100), truncated("he_normal", 2.0 / 40), truncated("lecun_normal", 1.0 / 40),
        Case{"uniform", 0.1 / std::sqrt(12.0), 0.05}, Case{"normal", 0.05, 0.05 * 6}}) {
    auto weight = at::empty({60, 40});
    Initializer(c.name).fill(weight);
    EXPECT_NEAR(weight.std().item<double>(), c.deviation, 0.06 * c.deviation) << c.name;
    EXPECT_LE(weight.abs().max().item<double>(), c.bound * 1.0001) << c.name;
    EXPECT_NEAR(weight.mean().item<double>(), 0, 0.1 * c.deviation) << c.name;
  }
}

}  // namespace
}  // namespace lockstep
