#include "ops/replica_random.h"

#include <gtest/gtest.h>
#include <torch/nn/functional/dropout.h>

#include <thread>

namespace lockstep {
namespace {

namespace F = torch::nn::functional;

torch::Tensor draw_everything() {
  auto x = torch::ones({64}, torch::requires_grad());
  const auto dropped = F::dropout(x, F::DropoutFuncOptions().p(0.5));
  dropped.sum().backward();
  return torch::cat(std::vector<torch::Tensor>{dropped.detach(), x.grad(), torch::rand({8}), torch::randn({8}), torch::bernoulli(torch::full({8}, 0.5)),
                     torch::randperm(8).to(torch::kFloat), torch::randint(100, {8}).to(torch::kFloat),
                     torch::multinomial(torch::ones({8}), 4).to(torch::kFloat), torch::empty({8}).exponential_(),
                     at::normal(torch::zeros({8}), 1.0), F::alpha_dropout(torch::ones({8}), F::AlphaDropoutFuncOptions().training(true))});
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
}  // namespace lockstep
