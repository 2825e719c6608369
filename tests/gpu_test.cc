// Training on a GPU: the same weights as on the CPU, whichever way the step is made. Fails where there is no GPU.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <lockstep/parallel.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <limits>

#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "gradient/replicated_parameters.h"
#include "ops/traced_program.h"
#include "parallel/split_linear.h"
#include "strategy/unwrap.h"

namespace lockstep {
namespace {

using MakeLayers = std::function<std::vector<Layer>()>;

constexpr int kExamples = 148, kBatch = 32;  // an epoch's last batch has 20
constexpr int kEpochs = 4;

std::vector<Layer> dense() { return {Flatten(), Dense(32, {.activation = "relu"}), Dense(3)}; }

std::vector<Layer> with_dropout() {
  return {Flatten(), Dense(64, {.activation = "relu"}), Dropout(0.5), Dense(64, {.activation = "tanh"}), Dropout(0.2),
          Dense(3)};
}

std::vector<Layer> convolution() {
  return {Conv2D(8, 3, {.use_bias = false}),  // before normalization a bias has no gradient but rounding errors
          BatchNormalization(),
          Activation("relu"),
          Conv2D(8, 3, {.padding = "same", .activation = "relu"}),
          MaxPooling2D(),
          Flatten(),
          Dense(3)};
}

Dataset batches(at::ScalarType dtype = at::kFloat) {
  at::manual_seed(4);
  const auto x = at::randn({kExamples, 2, 10, 10}, dtype);
  const auto y = x.mean({2, 3}).sum(1).mul(10).clamp(-1, 1).round().add(1).to(at::kLong);
  return Dataset::from_tensor_slices(x, y).batch(kBatch);
}

// All weights, in the host's memory.
Tensor weights_of(const Model& model) {
  const auto& parameters = unwrap(model.module());
  return at::cat({parameters.flat(0, at::kFloat).to(at::kDouble), parameters.flat(0, at::kDouble)}).cpu();
}

struct Training {
  std::string device = "cuda:0";
  Optimizer optimizer = Adam();
  bool jit_compile = false;
  std::string policy = "float32";
  at::ScalarType dtype = at::kFloat;
};

Sequential make_model(const MakeLayers& layers, const Training& training) {
  const OneDeviceStrategy strategy(training.device);
  const auto scope = strategy.scope();
  set_random_seed(3);
  set_global_policy(training.policy);
  Sequential model(layers());
  set_global_policy("float32");
  model.compile({.optimizer = training.optimizer,
                 .loss = SparseCategoricalCrossentropy({.from_logits = true}),
                 .metrics = {"accuracy"},
                 .jit_compile = training.jit_compile});
  return model;
}

Sequential fitted(const MakeLayers& layers, const Training& training) {
  auto model = make_model(layers, training);
  model.fit(batches(training.dtype), {.epochs = kEpochs, .verbose = 0});
  return model;
}

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(at::hasCUDA()) << "this machine has no GPU that LibTorch can use";
    at::globalContext().setAllowTF32CuDNN(false);
    at::globalContext().setDeterministicCuDNN(true);
  }

  // How far the weights are from the CPU's, in parts of the way that they went.
  static double difference_from_cpu(const MakeLayers& layers, Training training) {
    const auto trained = weights_of(fitted(layers, training));
    training.device = "cpu:0";
    training.jit_compile = false;
    const auto expected = weights_of(fitted(layers, training));
    auto untrained = make_model(layers, training);
    untrained.build({2, 10, 10}, training.dtype);
    return ((trained - expected).norm() / (expected - weights_of(untrained)).norm()).item<double>();
  }
};

// Counts what is recorded and played.
class RecordedOnGpu : public Gpu {
 protected:
  void SetUp() override {
    Gpu::SetUp();
    if (HasFatalFailure()) return;
    ASSERT_TRUE(recorder_) << "this build has no recorder";
    ops::work_recorder() = [this](c10::Device device, const std::function<void()>& work) {
      class Counted final : public ops::RecordedWork {
       public:
        Counted(std::unique_ptr<ops::RecordedWork> work, int& plays) : work_(std::move(work)), plays_(plays) {}
        void replay() override {
          ++plays_;
          work_->replay();
        }

       private:
        std::unique_ptr<ops::RecordedWork> work_;
        int& plays_;
      };
      ++tries_;
      auto recorded = std::make_unique<Counted>(recorder_(device, work), plays_);
      ++recordings_;
      return recorded;
    };
  }
  void TearDown() override { ops::work_recorder() = recorder_; }

  // Trains both ways; the weights must have the same bits.
  void expect_as_without(const MakeLayers& layers, Training training) {
    const auto expected = weights_of(fitted(layers, training));
    training.jit_compile = true;
    const auto played = weights_of(fitted(layers, training));
    EXPECT_TRUE(at::equal(played, expected)) << "they differ by " << (played - expected).abs().max().item<float>();
    EXPECT_EQ(recordings_, 1);
    EXPECT_EQ(plays_, kEpochs * (kExamples / kBatch) - 3);
  }

  int tries_ = 0, recordings_ = 0, plays_ = 0;

 private:
  const ops::WorkRecorder recorder_ = ops::work_recorder();
};

TEST_F(Gpu, IsTheDefault) {
  EXPECT_EQ(OneDeviceStrategy().devices(), std::vector<std::string>{"cuda:0"});
  EXPECT_EQ(MirroredStrategy().devices()[0], "cuda:0");
  EXPECT_EQ(MirroredStrategy().num_replicas_in_sync(), static_cast<int>(at::detail::getCUDAHooks().deviceCount()));
}

TEST_F(Gpu, TrainsAsTheCpu) {
  const std::vector<Optimizer> optimizers{
      SGD({.learning_rate = 0.05, .momentum = 0.9}),
      SGD({.learning_rate = 0.05, .momentum = 0.9, .nesterov = true, .global_clipnorm = 0.5}),
      SGD({.learning_rate = CosineDecay(0.1, 20), .clipnorm = 0.2}),
      Adam(),
      Adam({.amsgrad = true, .global_clipnorm = 0.1}),
      AdamW({.weight_decay = 0.01, .clipvalue = 0.01}),
      RMSprop({.momentum = 0.5, .centered = true}),
      Adagrad({.learning_rate = 0.05})};
  for (const auto& optimizer : optimizers) {
    SCOPED_TRACE(optimizer.rule().name());
    EXPECT_LT(difference_from_cpu(dense, {.optimizer = optimizer}), 1e-3);
    EXPECT_LT(difference_from_cpu(dense, {.optimizer = optimizer, .dtype = at::kDouble}), 1e-6);
    // In single precision a rounding error sometimes changes which element pooling takes, and from there on the
    // weights.
    EXPECT_LT(difference_from_cpu(convolution, {.optimizer = optimizer, .dtype = at::kDouble}), 1e-6);
  }
}

TEST_F(Gpu, StrategiesOverAllGpusTrainAsOneCpu) {
  const auto fitted_by = [](const Strategy& strategy) {
    const auto scope = strategy.scope();
    set_random_seed(3);
    Sequential model(convolution());
    model.compile(
        {.optimizer = Adam({.global_clipnorm = 0.5}), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
    model.fit(batches(at::kDouble), {.epochs = kEpochs, .verbose = 0});
    return weights_of(model);
  };
  const auto gpus = static_cast<int>(at::detail::getCUDAHooks().deviceCount());
  const auto expected =
      fitted_by(MirroredStrategy(gpus));  // as many replicas, which normalize as many parts of a batch
  for (const auto ops : {CrossDeviceOps::one_pass, CrossDeviceOps::reduction_to_one_device,
                         CrossDeviceOps::hierarchical_copy_all_reduce}) {
    const MirroredStrategy strategy({.cross_device_ops = ops});
    EXPECT_EQ(strategy.devices().back(), text("cuda:", gpus - 1));
    EXPECT_TRUE(at::allclose(fitted_by(strategy), expected, 1e-6, 1e-9));
  }
  EXPECT_TRUE(at::allclose(fitted_by(CentralStorageStrategy()), expected, 1e-6, 1e-9));
}

// Forward and backward run in different threads.
TEST_F(Gpu, RecomputedDropoutHasTheSameBits) {
  struct DropsImpl : torch::nn::Module {
    DropsImpl() { layer = register_module("layer", torch::nn::Linear(20, 20)); }
    Tensor forward(const Tensor& x) { return torch::dropout(layer(x), 0.5, is_training()); }
    torch::nn::Linear layer = nullptr;
  };
  const auto net = std::make_shared<DropsImpl>();
  net->to(at::kCUDA);
  const auto x = at::randn({8, 20}).cuda();
  const auto gradient = [&](bool recomputes) {
    torch::manual_seed(5);
    net->zero_grad();
    const auto y = recomputes ? recompute(net, x) : net->forward(x);
    at::rand({3}, x.options());  // what the model draws after it
    (y * y).sum().backward();
    return net->layer->weight.grad().clone();
  };
  EXPECT_TRUE(at::equal(gradient(true), gradient(false)));
}

TEST_F(Gpu, GradientsOfWeightsCanBeLeftForLater) {
  const auto x = at::randn({8, 5}).cuda();
  const auto weight = at::randn({3, 5}).cuda().requires_grad_();
  torch::linear(x, weight).pow(2).sum().backward();
  const auto expected = std::exchange(weight.mutable_grad(), Tensor());
  const auto later = std::make_shared<parallel::WeightGradients>();
  {
    const auto leaving = parallel::leave_weights_to(later);
    parallel::split_linear(x, weight, {}).pow(2).sum().backward();
  }
  EXPECT_FALSE(weight.grad().defined());
  later->compute();
  EXPECT_TRUE(at::allclose(weight.grad(), expected));
}

TEST_F(Gpu, TwoRunsHaveTheSameBits) {
  for (const auto& layers : {with_dropout, convolution}) {
    EXPECT_TRUE(at::equal(weights_of(fitted(layers, {})), weights_of(fitted(layers, {}))));
  }
}

TEST_F(Gpu, UsesSampleWeights) {
  const auto train = [](const std::string& device) {
    at::manual_seed(5);
    const auto weights = at::rand({kBatch});
    auto model = make_model(dense, {.device = device, .jit_compile = true});
    for (int i = 0; i < 6; ++i) {
      auto batch = *batches().iterate().next();
      batch.weight = weights;
      model.train_on_batch(batch);
    }
    return weights_of(model);
  };
  EXPECT_TRUE(at::allclose(train("cuda:0"), train("cpu:0"), 1e-3, 1e-4));
}

TEST_F(Gpu, EvaluatesAndPredictsAsTheCpu) {
  const auto path = fresh_folder("gpu", "weights") / "trained";
  auto model = fitted(convolution, {});
  model.save_weights(path);
  auto on_cpu = make_model(convolution, {.device = "cpu:0"});
  on_cpu.load_weights(path);
  const auto here = model.evaluate(batches()), there = on_cpu.evaluate(batches());
  EXPECT_NEAR(here["loss"], there["loss"], 1e-4);
  EXPECT_NEAR(here["accuracy"], there["accuracy"], 0.02);
  const auto outputs = model.predict(batches());
  EXPECT_EQ(outputs.size(0), kExamples);
  EXPECT_TRUE(at::allclose(outputs.cpu(), on_cpu.predict(batches()), 1e-3, 1e-4));
}

TEST_F(Gpu, CheckpointsGoOnOnTheCpuAndBack) {
  const auto folder = fresh_folder("gpu", "checkpoint");
  auto model = fitted(convolution, {});
  model.save_checkpoint(folder / "of_gpu");
  auto on_cpu = make_model(convolution, {.device = "cpu:0"});
  on_cpu.build({2, 10, 10});
  on_cpu.load_checkpoint(folder / "of_gpu");
  EXPECT_EQ(on_cpu.iterations(), model.iterations());
  EXPECT_TRUE(at::equal(weights_of(on_cpu), weights_of(model)));
  on_cpu.save_checkpoint(folder / "of_cpu");
  auto back = make_model(convolution, {.jit_compile = true});
  back.build({2, 10, 10});
  back.load_checkpoint(folder / "of_cpu");
  for (auto* const each : {&model, &on_cpu, &back}) {
    for (int i = 0; i < 6; ++i) each->train_on_batch(*batches().iterate().next());
  }
  EXPECT_TRUE(at::equal(weights_of(back), weights_of(model)));
  EXPECT_TRUE(at::allclose(weights_of(on_cpu), weights_of(model), 1e-3, 1e-4));
}

TEST_F(Gpu, MixedPrecisionTrains) {
  const auto plain = fitted(convolution, {}).evaluate(batches())["loss"];
  for (const char* policy : {"mixed_bfloat16", "mixed_float16"}) {
    SCOPED_TRACE(policy);
    auto model = fitted(convolution, {.policy = policy});
    EXPECT_NEAR(model.evaluate(batches())["loss"], plain, 0.05 * plain);
    EXPECT_EQ(model.optimizer().loss_scale() > 1, std::string(policy) == "mixed_float16");
    EXPECT_EQ(model.predict(batches()).scalar_type(), at::kFloat);
  }
}

TEST_F(Gpu, GradientsThatAreNotFiniteChangeNothingButTheScale) {
  const OneDeviceStrategy strategy("cuda:0");
  auto net = strategy.replicate([] { return torch::nn::Linear(6, 3); });
  const auto optimizer = strategy.optimizer(LossScaleOptimizer(Adam(), {.initial_scale = 64}), net);
  const auto step = [&](const Tensor& x) {
    strategy.run(
        [&](ReplicaContext& replica, torch::nn::Linear& own) {
          optimizer.minimize(replica, own(x.cuda()).pow(2).sum(), static_cast<double>(x.size(0)));
        },
        net);
  };
  step(at::randn({8, 6}));
  const auto before = net[0]->weight.detach().clone();
  step(at::full({8, 6}, std::numeric_limits<float>::infinity()));
  EXPECT_TRUE(at::equal(net[0]->weight, before));
  EXPECT_EQ(optimizer.iterations(), 1);
  EXPECT_EQ(optimizer.loss_scale(), 32);
  step(at::randn({8, 6}));
  EXPECT_FALSE(at::equal(net[0]->weight, before));
}

// A rule that has no kernels for GPUs.
struct Halved final : SpanRule<Halved> {
  std::string name() const override { return "halved"; }
  std::vector<StateSpec> states() const override { return {{.name = "sum", .initial_value = 0}}; }
  template <class T>
  void apply(const UpdateStep& step, std::span<T> value, std::span<const T> gradient, std::span<T* const> state) const {
    for (std::size_t i = 0; i < value.size(); ++i) {
      state[0][i] = state[0][i] / 2 + gradient[i];
      value[i] -= T(step.learning_rate) * state[0][i];
    }
  }
};

TEST_F(Gpu, ARuleOfOnesOwnComputesInHostMemory) {
  const Optimizer optimizer(std::make_shared<Halved>(), {.learning_rate = 0.05});
  EXPECT_LT(difference_from_cpu(dense, {.optimizer = optimizer}), 1e-3);
}

TEST_F(RecordedOnGpu, Dense) { expect_as_without(dense, {.optimizer = Adam({.global_clipnorm = 0.1})}); }

TEST_F(RecordedOnGpu, Momentum) {
  expect_as_without(convolution, {.optimizer = SGD({.learning_rate = CosineDecay(0.1, 20), .momentum = 0.9})});
}

TEST_F(RecordedOnGpu, DropoutDrawsAnewInEachReplay) { expect_as_without(with_dropout, {}); }

TEST_F(RecordedOnGpu, RunningStatistics) {
  expect_as_without(convolution, {});
  const auto statistics = [](bool jit_compile) {
    const auto model = fitted(convolution, {.jit_compile = jit_compile});
    return unwrap(model.module()).buffer(0, 0).cpu();
  };
  EXPECT_TRUE(at::equal(statistics(true), statistics(false)));
}

TEST_F(RecordedOnGpu, MixedPrecision) { expect_as_without(convolution, {.policy = "mixed_bfloat16"}); }

TEST_F(RecordedOnGpu, AStepThatWaitsForTheDeviceRunsAsWithout) {
  struct WaitingImpl : torch::nn::Module {
    WaitingImpl() { layer = register_module("layer", torch::nn::Linear(200, 3)); }
    Tensor forward(const Tensor& x) {
      const auto flat = x.flatten(1);
      return layer(flat) * (flat.abs().max().item<float>() > 0 ? 1 : 2);
    }
    torch::nn::Linear layer = nullptr;
  };
  const auto train = [](bool jit_compile) {
    const OneDeviceStrategy strategy("cuda:0");
    const auto scope = strategy.scope();
    set_random_seed(3);
    Model model([] { return std::make_shared<WaitingImpl>(); });
    model.compile({.optimizer = Adam(),
                   .loss = SparseCategoricalCrossentropy({.from_logits = true}),
                   .jit_compile = jit_compile});
    model.fit(batches(), {.epochs = kEpochs, .verbose = 0});
    return weights_of(model);
  };
  EXPECT_TRUE(at::equal(train(true), train(false)));
  EXPECT_EQ(tries_, 1) << "it was tried again";
  EXPECT_EQ(recordings_, 0);
  tries_ = 0;
  expect_as_without(with_dropout, {});  // the device, its memory and its random numbers can be used again
}

}  // namespace
}  // namespace lockstep
