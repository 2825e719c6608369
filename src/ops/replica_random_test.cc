#include "ops/replica_random.h"

#include <gtest/gtest.h>
#include <torch/nn/functional/dropout.h>

#include <thread>

namespace lockstep::ops {
namespace {

namespace F = torch::nn::functional;

// One draw of every kind that LibTorch has, and the gradient of a Dropout.
torch::Tensor draw_everything() {
  auto x = torch::ones({64}, torch::requires_grad());
  const auto ones = torch::ones({8});
  const auto dropped = F::dropout(x, F::DropoutFuncOptions().p(0.5));
  dropped.sum().backward();
  const std::vector<torch::Tensor> draws{dropped.detach(),
                                         x.grad(),
                                         torch::rand({8}),
                                         torch::randn({8}),
                                         torch::rand_like(ones),
                                         torch::bernoulli(ones / 2),
                                         torch::bernoulli(ones, 0.5),
                                         torch::randperm(8),
                                         torch::randint(100, {8}),
                                         torch::randint(3, 100, {8}),
                                         torch::multinomial(ones, 4),
                                         torch::empty({8}).exponential_(),
                                         torch::empty({8}).geometric_(0.5),
                                         torch::empty({8}).cauchy_(),
                                         torch::empty({8}).log_normal_(),
                                         torch::empty({8}).random_(),
                                         at::normal(ones, 1.0),
                                         at::normal(0.0, ones),
                                         at::normal(ones, ones),
                                         torch::poisson(ones * 5),
                                         torch::binomial(ones * 9, ones / 2),
                                         torch::_standard_gamma(ones),
                                         torch::_sample_dirichlet(torch::ones({8, 2})).flatten(),
                                         torch::alpha_dropout(ones, 0.5, true),
                                         torch::feature_dropout(torch::ones({8, 3}), 0.5, true).flatten(),
                                         torch::rrelu(-ones, 0.1, 0.9, true)};
  std::vector<torch::Tensor> all;
  for (const auto& draw : draws) all.push_back(draw.to(torch::kDouble));
  return torch::cat(all);
}

torch::Tensor draw_with_seed(std::uint64_t seed) {
  ReplicaRandom random;
  random.seed(seed);
  const ReplicaRandom::Use use(random);
  return draw_everything();
}

TEST(ReplicaRandom, NumbersDependOnTheSeedAlone) {
  const auto first = draw_with_seed(1);
  torch::manual_seed(5);  // the default generator has no say
  EXPECT_TRUE(torch::equal(draw_with_seed(1), first));
  EXPECT_FALSE(torch::equal(draw_with_seed(2), first));
}

TEST(ReplicaRandom, ThreadsDoNotDisturbEachOther) {
  const auto expected = draw_with_seed(7);
  std::vector<torch::Tensor> drawn(4);
  {
    std::vector<std::jthread> threads;
    for (auto& tensor : drawn) {
      threads.emplace_back([&tensor] {
        for (int round = 0; round < 20; ++round) tensor = draw_with_seed(7);
      });
    }
  }
  for (const auto& tensor : drawn) EXPECT_TRUE(torch::equal(tensor, expected));
}

TEST(ReplicaRandom, AGeneratorThatIsGivenIsUsed) {
  ReplicaRandom random;
  random.seed(3);
  const ReplicaRandom::Use use(random);
  auto own = at::detail::createCPUGenerator(11);
  const auto first = torch::empty({8}).uniform_(0, 1, own);
  own.set_current_seed(11);
  EXPECT_TRUE(torch::equal(torch::empty({8}).uniform_(0, 1, own), first));
}

TEST(ReplicaRandom, OutsideOfUseTheDefaultGeneratorServes) {
  torch::manual_seed(5);
  const auto expected = torch::rand({8});
  torch::manual_seed(5);
  draw_with_seed(1);
  EXPECT_TRUE(torch::equal(torch::rand({8}), expected));
}

}  // namespace
}  // namespace lockstep::ops
