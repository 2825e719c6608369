// fit with layers of experts on meshes against fit on one device.
#include "base/expect_says_testing.h"
#include "meshes.h"
#include "parallel/transformer_testing.h"

namespace lockstep {
namespace {

constexpr int kStepsToLearn = 50;  // the loss falls by a tenth

constexpr std::int64_t kWidth = parallel::kExpertWidth;

struct NetImpl : torch::nn::Module {
  NetImpl(const MoEOptions& options, const Communicator& ranks, double of_balance)
      : balance(of_balance),
        first(register_module("first", torch::nn::Linear(kWidth, kWidth))),
        moe(register_module("moe", MoE(
                                       options, kWidth, [] { return parallel::Expert(); }, ranks))) {
    to(at::kDouble);
  }
  Tensor forward(const Tensor& x) {
    const auto y = x + moe(torch::tanh(first(x)));
    add_loss(balance * moe->balance_loss());
    return y;
  }
  const double balance;
  torch::nn::Linear first;
  MoE moe;
};
TORCH_MODULE(Net);

// A net with the same values in all trainings: a strategy gives functions that make modules random numbers of its own.
Net make_net(const MoEOptions& options, const Communicator& ranks, double balance) {
  static const auto values = [] {
    torch::manual_seed(2);
    return parallel::parameters_of(*Net(MoEOptions{.experts = 8}, Communicator(), 0));
  }();
  Net net(options, ranks, balance);
  for (const auto& each : net->named_parameters()) each.value().set_data(values.at(each.key()).detach().clone());
  return net;
}

// Batches of 4 of 26 sequences of 5 tokens; where `ragged`, the last one has 2.
Dataset sequences(bool ragged) {
  const std::int64_t count = ragged ? 26 : 24;
  const auto x = at::sin(at::arange(count * 5 * kWidth, at::kDouble).view({count, 5, kWidth}) * 1.7);
  return Dataset::from_tensor_slices(x, x.flip(-1)).batch(4);
}

struct ExpertsCase {
  std::string name;
  Axes axes;
  MoEOptions moe;
  double balance = 0;  // over the ranks along the axis of experts alone
  bool ragged = false;
};

void PrintTo(const ExpertsCase& one, std::ostream* out) { *out << one.name; }

Trained train(const ExpertsCase& one, const Communicator& ranks) {
  const auto data = sequences(one.ragged);
  Model model([&] { return make_net(one.moe, ranks, one.balance); });
  model.compile(
      {.optimizer = Adam({.learning_rate = 1e-2, .global_clipnorm = 0.5}), .loss = "mse", .metrics = {"mae"}});
  const auto history = model.fit(data.repeat(), {.epochs = 2,
                                                 .verbose = 0,
                                                 .validation_data = data,
                                                 .steps_per_epoch = kStepsToLearn / 2,
                                                 .handle_signals = false});
  return {whole_weights(model), history.history, model.predict(data).cpu()};
}

class MeshExperts : public testing::TestWithParam<ExpertsCase> {};

TEST_P(MeshExperts, AreThoseOfOneDevice) {
  const auto expected = [&] {
    const OneDeviceStrategy strategy("cpu:0", 1);
    const auto scope = strategy.scope();
    return train(GetParam(), {});
  }();
  EXPECT_LT(expected.history.at("loss").back(), 0.9 * expected.history.at("loss").front());
  std::mutex one_at_a_time;
  on_mesh(GetParam().axes, {}, [&](const ModelParallelStrategy& strategy) {
    const auto trained = train(GetParam(), strategy.mesh()["expert"]);
    const std::lock_guard lock(one_at_a_time);
    EXPECT_LT(parallel::largest_difference(trained.weights, expected.weights), 1e-9);
    for (const auto& [metric, values] : trained.history) {
      for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], expected.history.at(metric)[i], 1e-9);
    }
    EXPECT_LT((trained.predicted - expected.predicted).abs().max().item<double>(), 1e-9);
  });
}

const MoEOptions kTwoOfEight{.experts = 8, .top_k = 2};

INSTANTIATE_TEST_SUITE_P(
    Meshes, MeshExperts,
    testing::Values(ExpertsCase{"expert2", {{"expert", 2}}, kTwoOfEight, 0.05},
                    ExpertsCase{"expert4", {{"expert", 4}}, kTwoOfEight, 0.05},
                    ExpertsCase{"expert4one", {{"expert", 4}}, {.experts = 8, .top_k = 1}, 0.05},
                    ExpertsCase{
                        "expert4capacity", {{"expert", 4}}, {.experts = 8, .top_k = 2, .capacity_factor = 1}, 0.05},
                    ExpertsCase{"expert4ragged", {{"expert", 4}}, kTwoOfEight, 0, true},
                    ExpertsCase{"data2expert2", {{"data", 2}, {"expert", 2}}, kTwoOfEight},
                    ExpertsCase{"data2expert2ragged", {{"data", 2}, {"expert", 2}}, kTwoOfEight, 0, true}),
    [](const auto& each) { return each.param.name; });

TEST(MeshExperts, CheckpointsHaveAllOfThem) {
  const auto path = testing::TempDir() + "/mesh_experts";
  const ExpertsCase two{"", {{"expert", 2}}, kTwoOfEight}, four{"", {{"expert", 4}}, kTwoOfEight};
  const auto make = [](const ExpertsCase& one, const Communicator& ranks) {
    Model model([&] { return make_net(one.moe, ranks, 0); });
    model.compile({.optimizer = Adam({.learning_rate = 1e-2}), .loss = "mse"});
    return model;
  };
  const auto fit = [](Model& model, int epochs) {
    model.fit(sequences(false), {.epochs = epochs, .verbose = 0, .handle_signals = false});
  };
  on_mesh(two.axes, {}, [&](const ModelParallelStrategy& strategy) {
    auto model = make(two, strategy.mesh()["expert"]);
    fit(model, 2);
    model.save_checkpoint(path);
  });
  Trained expected;
  {
    const OneDeviceStrategy strategy("cpu:0", 1);
    const auto scope = strategy.scope();
    auto model = make(two, {});
    model.build({5, kWidth}, at::kDouble);
    model.load_checkpoint(path);
    fit(model, 2);
    expected.weights = whole_weights(model);
  }
  on_mesh(four.axes, {}, [&](const ModelParallelStrategy& strategy) {
    auto model = make(four, strategy.mesh()["expert"]);
    model.build({5, kWidth}, at::kDouble);
    model.load_checkpoint(path);
    fit(model, 2);
    EXPECT_LT(parallel::largest_difference(whole_weights(model), expected.weights), 1e-9);
  });
}

TEST(MeshExperts, AddedLossesThatHaveNoGradientAreRefused) {
  expect_says(message_of<InvalidArgument>([] { add_loss(at::zeros({2})); }), "add_loss: the loss has shape [2]");
  add_loss(at::zeros({}));  // outside of fit it does nothing
  on_mesh({{"pipeline", 2}}, {}, [](const ModelParallelStrategy&) {
    Model model({[] { return Net(kTwoOfEight, Communicator(), 0.1); },
                 [] {
                   torch::nn::Linear last(kWidth, 1);
                   last->to(at::kDouble);
                   return last;
                 }});
    model.compile({.optimizer = "sgd", .loss = "mse"});
    const auto x = at::ones({4, 5, kWidth}, at::kDouble);
    expect_says(message_of<Error>([&] {
                  model.fit(Dataset::from_tensor_slices(x, x.slice(2, 0, 1)).batch(4),
                            {.verbose = 0, .handle_signals = false});
                }),
                "add_loss: a model that is cut into stages has no loss but that of its last stage");
  });
}

}  // namespace
}  // namespace lockstep
