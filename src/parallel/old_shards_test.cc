// Gathered values that an optimizer made old, against one process in double precision.
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <string>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "lockstep/parallel.h"

namespace lockstep::parallel {
namespace {

torch::nn::Sequential make_two_layers() {
  torch::nn::Sequential net(torch::nn::Linear(6, 5), torch::nn::Tanh(), torch::nn::Linear(5, 3));
  net->to(at::kDouble);
  const at::NoGradGuard no_gradient;
  for (auto& parameter : net->parameters())
    parameter.copy_(at::sin(at::arange(parameter.numel(), at::kDouble)).view(parameter.sizes()) * 0.4);
  return net;
}

// Each test looks at the outputs first, which gathers. Some of LibTorch's optimizers write through Tensor::data, whose
// version is not the shard's.
TEST(OldShards, AreRefusedAfterEachOptimizer) {
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)>;
  const std::vector<Make> makers{
      [](const auto& of) { return std::make_unique<torch::optim::SGD>(of, torch::optim::SGDOptions(0.5)); },
      [](const auto& of) { return std::make_unique<torch::optim::RMSprop>(of); },
      [](const auto& of) { return std::make_unique<torch::optim::Adagrad>(of); },
      [](const auto& of) { return std::make_unique<torch::optim::Adam>(of); },
      [](const auto& of) { return std::make_unique<torch::optim::AdamW>(of); },
  };
  const auto x = at::cos(at::arange(24, at::kDouble).view({4, 6}));
  for (std::size_t kind = 0; kind < makers.size(); ++kind) {
    for (const auto& units : {std::vector<std::string>{}, std::vector<std::string>{"0", "2"}}) {
      SCOPED_TRACE(testing::Message() << kind << ", units " << units.size());
      collective::on_ranks(2, [&](const Group& group) {
        auto whole = make_two_layers(), net = make_two_layers();
        auto sharded = fully_shard(net, {group, 30}, {.units = units, .reshard_after_forward = false});
        const auto of_sharded = makers[kind](sharded.parameters()), of_whole = makers[kind](whole->parameters());
        for (int step = 0; step < 2; ++step) {
          of_sharded->zero_grad();
          of_whole->zero_grad();
          sharded(x).pow(2).mean().backward();
          whole->forward(x).pow(2).mean().backward();
          const at::NoGradGuard no_gradient;
          sharded->forward(x);
          of_sharded->step();
          of_whole->step();
          expect_says(message_of([&] { sharded->forward(x); }), "which are old: call what fully_shard returned");
          EXPECT_TRUE(at::allclose(sharded(x), whole->forward(x), 1e-9, 1e-12));
          of_sharded->step();
          of_whole->step();
          sharded.release();
          EXPECT_TRUE(at::allclose(sharded->forward(x), whole->forward(x), 1e-9, 1e-12));
        }
      });
    }
  }
}

template <class Step>
std::string printed_by(int steps, const Step& step) {
  testing::internal::CaptureStderr();
  collective::on_ranks(2, [&](const Group& group) {
    auto net = make_two_layers();
    auto sharded = fully_shard(net, {group, 30});
    for (int i = 0; i < steps; ++i) step(sharded, net);
  });
  return testing::internal::GetCapturedStderr();
}

TEST(OldShards, AreWarnedOfWhereTheModulesParametersAreUsedInTheirPlace) {
  const auto backward = [](auto& sharded) { sharded(torch::ones({4, 6}, at::kDouble)).pow(2).mean().backward(); };
  const auto step_of = [](const std::vector<at::Tensor>& of) {
    torch::optim::SGD(of, torch::optim::SGDOptions(0.1)).step();
  };
  const auto clear = [](const std::vector<at::Tensor>& of) {
    torch::optim::SGD(of, torch::optim::SGDOptions(0.1)).zero_grad();
  };
  EXPECT_EQ(printed_by(1010,
                       [&](auto& sharded, auto&) {
                         clear(sharded.parameters());
                         backward(sharded);
                         step_of(sharded.parameters());
                       }),
            "");
  EXPECT_EQ(printed_by(20,
                       [&](auto& sharded, auto&) {  // losses in turns, of which one accumulates between steps
                         backward(sharded);
                         clear(sharded.parameters());
                         for (int i = 0; i < 3; ++i) backward(sharded);
                         step_of(sharded.parameters());
                       }),
            "");
  EXPECT_EQ(printed_by(20,
                       [&](auto& sharded, auto&) {  // an optimizer of some: the others' gradients add up unused
                         const std::vector<at::Tensor> some{sharded.parameters().back()};
                         clear(some);
                         backward(sharded);
                         step_of(some);
                       }),
            "");
  expect_says(printed_by(1010,
                         [&](auto& sharded, auto& net) {
                           clear(net->parameters());
                           backward(sharded);
                           step_of(net->parameters());
                         }),
              "give optimizers the parameters() of what fully_shard returned");
  for (const bool clips : {false, true}) {
    expect_says(printed_by(20,
                           [&](auto& sharded, auto& net) {
                             net->zero_grad();
                             backward(sharded);
                             if (clips) sharded.clip_grad_norm(1e-3);
                             step_of(sharded.parameters());
                           }),
                "call zero_grad() of the optimizer, since the module's own clears nothing");
  }
}

}  // namespace
}  // namespace lockstep::parallel
