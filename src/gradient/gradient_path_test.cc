// Replicas on threads against one replica and against LibTorch's own optimizers in double precision.
#include "gradient/gradient_path.h"

#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <thread>

#include "gradient/net_testing.h"
#include "lockstep/base/error.h"

namespace lockstep::gradient {
namespace {

struct Run {
  std::shared_ptr<ReplicatedParameters> parameters;
  std::shared_ptr<GradientPath> gradients;
};

Run train(int replicas, const Optimizer& optimizer, Exchange exchange, Placement placement, at::ScalarType dtype,
          int steps) {
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  for (int i = 0; i < replicas; ++i) modules.push_back(make_net(dtype));
  auto parameters = std::make_shared<ReplicatedParameters>(modules, placement);
  auto gradients = std::make_shared<GradientPath>(parameters, optimizer,
                                                  GradientPathOptions{.exchange = exchange, .root = replicas - 1});
  const auto groups = make_thread_groups(replicas);
  const auto data = batches(steps, dtype);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < replicas; ++rank) {
    threads.emplace_back([&, rank] {
      auto& net = dynamic_cast<NetImpl&>(parameters->module(rank));
      for (const auto& batch : data) {
        const auto size = batch.x.size(0);
        const auto begin = size * rank / replicas;
        const auto count = size * (rank + 1) / replicas - begin;
        if (count > 0) {
          const auto out = net.forward(batch.x.narrow(0, begin, count));
          (out - batch.y.narrow(0, begin, count)).pow(2).sum().backward();
        }
        gradients->apply(groups[static_cast<std::size_t>(rank)], static_cast<double>(count), soon());
      }
    });
  }
  threads.clear();
  return {parameters, gradients};
}

void expect_equal_copies(const ReplicatedParameters& parameters) {
  for (int replica = 1; replica < parameters.replicas(); ++replica) {
    for (std::size_t i = 0; i < parameters.slots().size(); ++i) {
      EXPECT_TRUE(torch::equal(parameters.parameter(replica, i), parameters.parameter(0, i)))
          << parameters.slots()[i].name;
    }
  }
}

TEST(GradientPath, AnyNumberOfReplicasGivesTheSameWeights) {
  for (const auto& [name, optimizer] : optimizers()) {
    const auto one = train(1, optimizer, Exchange::one_pass, Placement::mirrored, at::kDouble, 50);
    const auto one_float = train(1, optimizer, Exchange::one_pass, Placement::mirrored, at::kFloat, 20);
    for (const int replicas : {2, 3, 4}) {
      for (const auto exchange : {Exchange::one_pass, Exchange::reduction_to_one_device, Exchange::hierarchical_copy}) {
        for (const auto placement : {Placement::mirrored, Placement::central, Placement::staged}) {
          SCOPED_TRACE(testing::Message()
                       << name << ", " << replicas << " replicas, exchange " << static_cast<int>(exchange));
          const auto many = train(replicas, optimizer, exchange, placement, at::kDouble, 50);
          expect_close(*one.parameters, *many.parameters, 1e-9);
          expect_equal_copies(*many.parameters);
          EXPECT_EQ(many.gradients->updater().iterations(), 50);
          const auto many_float = train(replicas, optimizer, exchange, placement, at::kFloat, 20);
          expect_close(*one_float.parameters, *many_float.parameters, 1e-5);
          expect_equal_copies(*many_float.parameters);
        }
      }
    }
  }
}

// Here "the device" is the CPU: LibTorch's operators are the same.
TEST(GradientPath, UpdatesOnADeviceAreThoseInHostMemory) {
  auto all = optimizers();
  all.push_back({"amsgrad", Adam({.learning_rate = 0.01, .amsgrad = true})});
  for (const auto& [name, optimizer] : all) {
    SCOPED_TRACE(name);
    for (const auto& [dtype, steps, tolerance] :
         {std::tuple(at::kDouble, 50, 1e-9), std::tuple(at::kFloat, 20, 1e-5)}) {
      const auto host = train(1, optimizer, Exchange::one_pass, Placement::mirrored, dtype, steps);
      const auto device = train(1, optimizer, Exchange::one_pass, Placement::device, dtype, steps);
      expect_close(*host.parameters, *device.parameters, tolerance);
      EXPECT_EQ(device.gradients->updater().iterations(), steps);
    }
  }
}

// Remembers half of the last gradient. Several types, of which some have a rule for devices.
template <bool registered>
class HalfRule final : public SpanRule<HalfRule<registered>> {
 public:
  std::string name() const override { return "half"; }
  std::vector<StateSpec> states() const override { return {{"last", 0}}; }
  template <class T>
  void apply(const UpdateStep&, std::span<T> value, std::span<const T> gradient, std::span<T* const> state) const {
    for (std::size_t i = 0; i < value.size(); ++i)
      value[i] -= T(0.01) * (gradient[i] + (state[0][i] = gradient[i] / 2));
  }
};

class HalfOnDevice final : public DeviceRule {
 public:
  explicit HalfOnDevice(int& updates) : updates_(updates) {}
  std::vector<double> numbers(const UpdateStep&) const override { return {}; }
  void update(const DeviceParameters& all, const std::vector<at::Tensor>&) override {
    ++updates_;
    for (std::size_t i = 0; i < all.values.size(); ++i) {
      all.states[0][i].copy_(all.gradients[i] / 2);
      all.values[i].sub_(0.01 * (all.gradients[i] + all.states[0][i]));
    }
  }

 private:
  int& updates_;
};

template <bool registered>
void expect_the_same_on_a_device() {
  const Optimizer optimizer(std::make_shared<HalfRule<registered>>(), {.weight_decay = 0.1});
  const auto host = train(1, optimizer, Exchange::one_pass, Placement::mirrored, at::kDouble, 10);
  const auto device = train(1, optimizer, Exchange::one_pass, Placement::device, at::kDouble, 10);
  expect_close(*host.parameters, *device.parameters, 1e-12);
  EXPECT_TRUE(torch::allclose(host.gradients->updater().state(2, 0), device.gradients->updater().state(2, 0)));
  EXPECT_GT(host.gradients->updater().state(2, 0).abs().max().item<double>(), 0);
}

TEST(GradientPath, ARuleOfTheUsersOwnUpdatesOnADeviceToo) { expect_the_same_on_a_device<false>(); }

TEST(GradientPath, ARuleOfTheUsersOwnMayHaveItsOwnUpdateForDevices) {
  int updates = 0;
  register_device_rule<HalfRule<true>>(
      [&](const HalfRule<true>&, const at::TensorOptions&) { return std::make_unique<HalfOnDevice>(updates); });
  expect_the_same_on_a_device<true>();
  EXPECT_EQ(updates, 10);
}

template <class Make>
void expect_as_libtorch(const Optimizer& ours, const Make& make) {
  const auto run = train(3, ours, Exchange::one_pass, Placement::mirrored, at::kDouble, 20);
  auto net = make_net(at::kDouble);
  auto theirs = make(net->parameters());
  for (const auto& batch : batches(20, at::kDouble)) {
    theirs->zero_grad();
    ((net->forward(batch.x) - batch.y).pow(2).sum() / batch.x.size(0)).backward();
    theirs->step();
  }
  for (std::size_t i = 0; i < run.parameters->slots().size(); ++i) {
    const auto& slot = run.parameters->slots()[i];
    const auto difference = (run.parameters->parameter(0, i) - net->named_parameters()[slot.name]).abs().max();
    EXPECT_LE(difference.item<double>(), 1e-9) << slot.name;
  }
}

TEST(GradientPath, FollowsLibTorchsOwnOptimizers) {
  expect_as_libtorch(SGD({.learning_rate = 0.05}), [](auto parameters) {
    return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05));
  });
  // epsilon 0: LibTorch adds it after the bias correction, Keras before.
  expect_as_libtorch(Adam({.learning_rate = 0.01, .epsilon = 0}), [](auto parameters) {
    return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.01).eps(0));
  });
}

TEST(GradientPath, AParameterThatNobodyUsesKeepsItsValueAndState) {
  const auto run = train(2, AdamW({.weight_decay = 0.1}), Exchange::one_pass, Placement::mirrored, at::kFloat, 5);
  for (std::size_t i = 0; i < run.parameters->slots().size(); ++i) {
    const auto& name = run.parameters->slots()[i].name;
    if (name != "unused" && name != "frozen") continue;
    EXPECT_TRUE(torch::equal(run.parameters->parameter(0, i), torch::ones_like(run.parameters->parameter(0, i))))
        << name;
    const auto state = run.gradients->updater().state(i, 0);
    EXPECT_EQ(state.numel(), name == "frozen" ? 0 : 3) << name;
    EXPECT_EQ(state.abs().sum().item<double>(), 0) << name;
  }
}

// A gradient that was handed over in a step that broke off is not used in the next.
TEST(GradientPath, TheStepAfterAFailureUsesItsOwnGradients) {
  auto parameters = std::make_shared<ReplicatedParameters>(
      std::vector<std::shared_ptr<torch::nn::Module>>{make_net(at::kDouble), make_net(at::kDouble)},
      Placement::mirrored);
  GradientPath gradients(parameters, SGD({.learning_rate = 0.1}));
  const auto weight = [&](int replica) { return dynamic_cast<NetImpl&>(parameters->module(replica)).unused; };
  auto groups = make_thread_groups(2);
  (weight(0) * 1000).sum().backward();
  groups[1].abort("the other replica failed");
  EXPECT_THROW(gradients.apply(groups[0], 1, soon()), Aborted);
  groups = make_thread_groups(2);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      weight(rank).sum().backward();
      gradients.apply(groups[static_cast<std::size_t>(rank)], 1, soon());
    });
  }
  threads.clear();
  EXPECT_TRUE(torch::allclose(weight(0), at::full({3}, 0.9, at::kDouble))) << weight(0);
  EXPECT_FALSE(weight(0).grad().defined());
}

TEST(GradientPath, AFailureOnOneReplicaLeavesAllWeightsAsTheyWere) {
  std::vector<std::shared_ptr<torch::nn::Module>> modules{make_net(at::kFloat), make_net(at::kFloat)};
  auto parameters = std::make_shared<ReplicatedParameters>(modules, Placement::mirrored);
  GradientPath gradients(parameters, SGD());
  const auto groups = make_thread_groups(2);
  const auto before = parameters->flat(0, at::kFloat).clone();
  std::jthread failing([&] { groups[1].abort("replica 1 ran out of luck"); });
  dynamic_cast<NetImpl&>(parameters->module(0)).forward(torch::ones({2, 7})).sum().backward();
  EXPECT_THROW(gradients.apply(groups[0], 2, soon()), Aborted);
  EXPECT_TRUE(torch::equal(parameters->flat(0, at::kFloat), before));
  EXPECT_TRUE(torch::equal(parameters->flat(1, at::kFloat), before));
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    weight = register_parameter("encoder", torch::full({4, 4}, 0.5));
    register_parameter("decoder", weight);
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::matmul(torch::matmul(x, weight), weight.t()); }
  torch::Tensor weight;
};

TEST(ReplicatedParameters, TiedParametersAreOneSlotWithTwoNames) {
  std::vector<std::shared_ptr<torch::nn::Module>> modules{std::make_shared<TiedImpl>(), std::make_shared<TiedImpl>()};
  auto parameters = std::make_shared<ReplicatedParameters>(modules, Placement::mirrored);
  ASSERT_EQ(parameters->slots().size(), 1U);
  EXPECT_EQ(parameters->slots()[0].aliases, std::vector<std::string>{"decoder"});

  GradientPath gradients(parameters, SGD({.learning_rate = 0.1}));
  const auto groups = make_thread_groups(2);
  std::vector<std::jthread> threads;
  for (int rank : {0, 1}) {
    threads.emplace_back([&, rank] {
      dynamic_cast<TiedImpl&>(parameters->module(rank)).forward(torch::eye(4).narrow(0, 2 * rank, 2)).sum().backward();
      gradients.apply(groups[static_cast<std::size_t>(rank)], 2, soon());
    });
  }
  threads.clear();
  auto expected = torch::full({4, 4}, 0.5, torch::requires_grad());
  torch::matmul(expected, expected.t()).sum().backward();
  EXPECT_TRUE(torch::allclose(parameters->parameter(1, 0), expected.detach() - 0.1 * expected.grad() / 4));
}

template <class A, class B>
std::string message_of_making(std::shared_ptr<A> a, std::shared_ptr<B> b) {
  try {
    ReplicatedParameters({a, b}, Placement::mirrored);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(ReplicatedParameters, ReplicasThatDifferAreAnErrorThatNamesTheParameter) {
  using torch::nn::LinearImpl;
  const auto linear = [](int in, int out) { return std::make_shared<LinearImpl>(in, out); };
  EXPECT_NE(message_of_making(linear(2, 3), linear(2, 4)).find("\"weight\" of replica 1 has shape [4, 2], not [3, 2]"),
            std::string::npos);
  const auto one = linear(2, 3);
  EXPECT_NE(message_of_making(one, one).find("one module twice"), std::string::npos);
  auto frozen = linear(2, 3);
  frozen->bias.set_requires_grad(false);
  EXPECT_NE(message_of_making(linear(2, 3), frozen).find("\"bias\" of replica 1 is frozen"), std::string::npos);
  auto half = linear(2, 3);
  half->to(at::kHalf);
  EXPECT_NE(message_of_making(half, half).find("trainable parameters are float or double"), std::string::npos);
}

}  // namespace
}  // namespace lockstep::gradient
