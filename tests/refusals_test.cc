// All workers refuse what one worker refuses: none waits for it, and they can train afterwards.
#include <torch/nn/modules/linear.h>

#include <stdexcept>

#include "base/expect_says_testing.h"
#include "base/text.h"
#include "tests/workers.h"

namespace lockstep {
namespace {

Sequential small_model(bool is_built) {
  Sequential model({Dense(1, {.kernel_initializer = "zeros"})});
  model.compile({.optimizer = SGD({.learning_rate = 0.01}), .loss = MeanSquaredError()});
  if (is_built) model.build({2}, at::kDouble);
  return model;
}

Dataset small_data() {
  const auto x = waves(9, 2);
  return Dataset::from_tensor_slices(x, x.sum(1, /*keepdim=*/true)).batch(4);
}

std::vector<Tensor> trained(Sequential& model) {
  model.fit(small_data(), {.epochs = 3, .verbose = 0});
  return weights_of(model);
}

// act(model, worker) throws on both workers: what worker 0 says, and what worker 1 says, which alone is wrong, or is as
// wrong as worker 0.
struct Refusal {
  std::string on_0, on_1;
  bool is_built;
  std::function<void(Sequential& model, int worker)> act;
};

void expect_refusal_and_training(const Refusal& refusal) {
  SCOPED_TRACE(refusal.on_0);
  std::vector<Tensor> expected;
  {
    const auto scope = OneDeviceStrategy("cpu:0", 1).scope();
    auto model = small_model(refusal.is_built);
    expected = trained(model);
  }
  expect_no_errors(run_workers({}, [&](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    auto model = small_model(refusal.is_built);
    const int worker = strategy.worker_rank();
    const auto said = message_of<InvalidArgument>([&] { refusal.act(model, worker); });
    EXPECT_EQ(said.find(worker == 0 ? refusal.on_0 : refusal.on_1), 0U) << said;
    EXPECT_LE(largest_difference(trained(model), expected), 1e-12);
  }));
}

Dataset empty_on(int worker, int here) { return worker < 0 || worker == here ? small_data().take(0) : small_data(); }

TEST(Refusals, OfAnEmptyDataSet) {
  constexpr int kAll = -1;
  for (const bool is_built : {true, false}) {
    const auto evaluate = [](int empty) {
      return [=](Sequential& model, int worker) { model.evaluate(empty_on(empty, worker), {.verbose = 0}); };
    };
    const auto predict = [](int empty) {
      return [=](Sequential& model, int worker) { model.predict(empty_on(empty, worker)); };
    };
    const auto fit = [](int empty) {
      return [=](Sequential& model, int worker) { model.fit(empty_on(empty, worker), {.verbose = 0}); };
    };
    const auto says = [&](const std::string& caller) {
      return text(is_built ? "" : caller + ": ", "the data set is empty");
    };
    expect_refusal_and_training({says("evaluate"), says("evaluate"), is_built, evaluate(kAll)});
    expect_refusal_and_training({"worker 1: " + says("evaluate"), says("evaluate"), is_built, evaluate(1)});
    expect_refusal_and_training({says("predict"), says("predict"), is_built, predict(kAll)});
    expect_refusal_and_training({"worker 1: " + says("predict"), says("predict"), is_built, predict(1)});
    const std::string fits = is_built ? "fit: the data set yielded no batch" : "fit: the data set is empty";
    expect_refusal_and_training({fits, fits, is_built, fit(kAll)});
    const std::string differ = "the workers' fits differ";
    expect_refusal_and_training({is_built ? differ : "worker 1: " + fits, is_built ? differ : fits, is_built, fit(1)});
  }
}

TEST(Refusals, OfOptionsAndModels) {
  const auto expect = [](const std::string& what, const std::function<void(Sequential & model, int worker)>& act) {
    expect_refusal_and_training({"worker 1: " + what, what, /*is_built=*/true, act});
  };
  expect("fit: epochs is 0",
         [](auto& model, int worker) { model.fit(small_data(), {.epochs = 1 - worker, .verbose = 0}); });
  expect("fit: validation_data is empty", [](auto& model, int worker) {
    model.fit(small_data(), {.verbose = 0, .validation_data = empty_on(1, worker)});
  });
  expect("steps is -1", [](auto& model, int worker) { model.predict(small_data(), {.steps = -worker}); });
  expect("the model has no trainable parameter", [](auto& model, int worker) {
    const auto train = [&](bool trains) {
      for (auto& parameter : unwrap(model.module()).module(0).parameters()) parameter.requires_grad_(trains);
    };
    train(worker == 0);
    try {
      model.fit(small_data(), {.verbose = 0});
    } catch (const Error&) {
      train(true);
      throw;
    }
  });
}

TEST(Refusals, OfAModelThatCannotBeMade) {
  const auto errors = run_workers({}, [](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    const auto make = [&](bool works) {
      if (!works) throw std::runtime_error("the vocabulary is not there");
      return torch::nn::Linear(2, 1);
    };
    const auto said =
        message_of<std::runtime_error>([&] { const Model model([&] { return make(strategy.is_chief()); }); });
    EXPECT_EQ(said, strategy.is_chief() ? "worker 1: the vocabulary is not there" : "the vocabulary is not there");
    const Model model([&] { return make(true); });
  });
  expect_no_errors(errors);
}

// In a step nobody asks: the others' calls end with the reason.
TEST(Refusals, OfABatch) {
  const auto errors = run_workers({}, [](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    auto model = small_model(true);
    model.train_on_batch({.x = strategy.is_chief() ? waves(4, 2) : Tensor(), .y = at::ones({4, 1}, at::kDouble)});
  });
  for (const auto& error : errors) expect_says(error, "an element of the data set has no x");
}

}  // namespace
}  // namespace lockstep
