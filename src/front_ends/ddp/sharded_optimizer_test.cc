// Sharded optimizers against torch::optim's own in a plain loop, in double precision.
#include "lockstep/ddp/sharded_optimizer.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize.h>

#include <filesystem>
#include <mutex>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"

namespace lockstep::ddp {
namespace {

constexpr int kShardedSteps = 50;

struct ShardedNetImpl : torch::nn::Module {
  ShardedNetImpl() {
    first = register_module("first", torch::nn::Linear(5, 40));
    second = register_module("second", torch::nn::Linear(40, 30));
    frozen = register_parameter("frozen", torch::ones({7}), /*requires_grad=*/false);
    never = register_parameter("never", torch::ones({64}));
    turned = register_parameter("turned", torch::randn({30, 20}).t());
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(second(torch::tanh(first(x)))).matmul(turned.t()); }
  torch::nn::Linear first = nullptr, second = nullptr;
  at::Tensor frozen, never, turned;
};
TORCH_MODULE(ShardedNet);

std::mutex making;  // of modules, whose initial values come from the process's generator

ShardedNet make_sharded_net() {
  const std::lock_guard lock(making);
  torch::manual_seed(3);
  return ShardedNet();
}

at::Tensor batch(int step, int rank, std::int64_t columns) {
  return at::sin(at::arange(4 * columns, at::kDouble).view({4, columns}) * (1 + 0.1 * rank) + step);
}

template <class M>
at::Tensor sharded_loss_of(M& model, int step, int rank) {
  return (model(batch(step, rank, 5)) - batch(step, rank, 20)).pow(2).sum();
}

// Returns the parameters that one process makes of all ranks' batches.
template <class Optimizer, class Options>
std::vector<at::Tensor> train_alone(int ranks, const Options& options, int steps = kShardedSteps) {
  auto net = make_sharded_net();
  Optimizer optimizer(net->parameters(), options);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < ranks; ++rank) (sharded_loss_of(net, step, rank) / ranks).backward();
    optimizer.step();
  }
  return net->parameters();
}

double largest_difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  const at::NoGradGuard no_gradient;
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, (a[i] - b[i]).abs().max().item<double>());
  return largest;
}

template <class Optimizer, class Options>
void expect_as_alone(const Options& options) {
  for (const int size : {1, 2, 3, 4}) {
    SCOPED_TRACE(size);
    const auto expected = train_alone<Optimizer>(size, options);
    collective::on_ranks(size, [&](const Group& group) {
      auto net = make_sharded_net();
      DistributedDataParallel ddp(net, group, {.timeout_seconds = 30});
      ShardedOptimizer<Optimizer> optimizer(ddp, options);
      for (int step = 0; step < kShardedSteps; ++step) {
        optimizer.zero_grad();
        sharded_loss_of(ddp, step, group.rank()).backward();
        optimizer.step();
      }
      EXPECT_LE(largest_difference(net->parameters(), expected), 1e-9);

      Optimizer whole(net->parameters(), options);
      sharded_loss_of(ddp, 0, 0).backward();
      whole.step();
      std::int64_t bytes = 0;
      for (auto& [parameter, state] : whole.state()) {
        using Shardable = internal::Shardable<Optimizer>;
        for (auto* const tensor : Shardable::tensors(static_cast<typename Shardable::State&>(*state))) {
          if (tensor->defined()) bytes += static_cast<std::int64_t>(tensor->nbytes());
        }
      }
      EXPECT_LE(optimizer.state_bytes(), 1.05 * static_cast<double>(bytes) / size);
    });
  }
}

TEST(ShardedOptimizer, EveryRuleIsThatOfOneProcess) {
  expect_as_alone<torch::optim::SGD>(torch::optim::SGDOptions(1e-3).momentum(0.9).nesterov(true).weight_decay(0.01));
  expect_as_alone<torch::optim::SGD>(torch::optim::SGDOptions(1e-3));
  expect_as_alone<torch::optim::Adam>(torch::optim::AdamOptions(1e-2).eps(1e-3));
  expect_as_alone<torch::optim::Adam>(torch::optim::AdamOptions(1e-2).eps(1e-3).amsgrad(true));
  expect_as_alone<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).eps(1e-3));
  expect_as_alone<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-3).eps(1e-3).momentum(0.5).centered(true));
  expect_as_alone<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2));
}

// Two groups of options, a schedule, and a second part of the training on another number of ranks, by way of a file
// that torch::optim itself reads and writes.
TEST(ShardedOptimizer, SavesAndRestoresOnAnyNumberOfRanks) {
  const auto groups_of = [](const ShardedNet& net) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(net->first->parameters());
    groups.emplace_back(std::vector<at::Tensor>{net->turned, net->second->weight, net->second->bias},
                        std::make_unique<torch::optim::AdamOptions>(3e-3));
    return groups;
  };
  const torch::optim::AdamOptions options(1e-2);
  constexpr int kHalf = 20, kBatches = 2;
  const auto path = testing::TempDir() + "/sharded_adam.pt";
  const auto first_half = [&](auto& net, auto& schedule, const auto& step) {
    for (int i = 0; i < kHalf; ++i) {
      for (int k = 0; k < kBatches; ++k) (sharded_loss_of(net, i, k) / kBatches).backward();
      step();
      schedule.step();
    }
  };
  auto net = make_sharded_net();
  torch::optim::Adam adam(groups_of(net), options);
  torch::optim::StepLR schedule(adam, 5, 0.5);
  const auto step_alone = [&] {
    adam.step();
    adam.zero_grad();
  };
  first_half(net, schedule, step_alone);
  std::vector<at::Tensor> halfway;
  for (const auto& parameter : net->parameters()) halfway.push_back(parameter.detach().clone());
  for (int i = 0; i < kHalf; ++i) {
    (sharded_loss_of(net, i, 0) + sharded_loss_of(net, i, 1)).backward();
    step_alone();
  }

  for (const auto& [before, after] : std::vector<std::pair<int, int>>{{3, 2}, {2, 4}, {1, 3}, {4, 1}}) {
    SCOPED_TRACE(testing::Message() << before << ", then " << after);
    std::filesystem::remove(path);
    collective::on_ranks(before, [&](const Group& group) {
      auto own = make_sharded_net();
      ShardedOptimizer<torch::optim::Adam> sharded(groups_of(own), group, options);
      torch::optim::StepLR own_schedule(sharded.local(), 5, 0.5);
      first_half(own, own_schedule, [&] {
        sharded.step();
        sharded.zero_grad();
      });
      EXPECT_LE(largest_difference(own->parameters(), halfway), 1e-9);
      const auto whole = sharded.consolidate(group.size() - 1);
      EXPECT_EQ(whole != nullptr, group.rank() == group.size() - 1);
      if (whole) torch::save(*whole, path);
    });
    collective::on_ranks(after, [&](const Group& group) {
      auto own = make_sharded_net();
      {
        const at::NoGradGuard no_gradient;
        for (std::size_t i = 0; i < halfway.size(); ++i) own->parameters()[i].copy_(halfway[i]);
      }
      torch::optim::Adam loaded(groups_of(own), options);
      torch::load(loaded, path);
      ShardedOptimizer<torch::optim::Adam> sharded(groups_of(own), group, options);
      sharded.load(loaded);
      for (int i = 0; i < kHalf; ++i) {
        (sharded_loss_of(own, i, 0) + sharded_loss_of(own, i, 1)).backward();
        sharded.step();
        sharded.zero_grad();
      }
      EXPECT_LE(largest_difference(own->parameters(), net->parameters()), 1e-9);
      torch::optim::Adam other(own->first->parameters(), options);
      expect_says(message_of<InvalidArgument>([&] { sharded.load(other); }),
                  "parameters of other shapes, dtypes or groups");
    });
  }
}

// Rank r makes 3 + r steps. A rank that is done still updates its shards.
TEST(ShardedOptimizer, JoinMakesTheOthersStepsToo) {
  constexpr int kShardRanks = 3;
  auto net = make_sharded_net();
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(1e-2));
  for (int step = 0; step < 3 + kShardRanks - 1; ++step) {
    adam.zero_grad();
    const int first = std::max(0, step - 2);
    for (int rank = first; rank < kShardRanks; ++rank)
      (sharded_loss_of(net, step, rank) / (kShardRanks - first)).backward();
    adam.step();
  }
  collective::on_ranks(kShardRanks, [&](const Group& group) {
    auto own = make_sharded_net();
    DistributedDataParallel ddp(own, group, {.timeout_seconds = 30});
    ShardedOptimizer<torch::optim::Adam> sharded(ddp, torch::optim::AdamOptions(1e-2));
    ddp.join([&] {
      for (int step = 0; step < 3 + group.rank(); ++step) {
        sharded.zero_grad();
        sharded_loss_of(ddp, step, group.rank()).backward();
        sharded.step();
      }
    });
    EXPECT_LE(largest_difference(own->parameters(), net->parameters()), 1e-9);
  });
}

TEST(ShardedOptimizer, NamesParametersThatItCannotTake) {
  const auto take = [](const at::Tensor& parameter) {
    return message_of<InvalidArgument>([&] {
      ShardedOptimizer<torch::optim::SGD>(std::vector<at::Tensor>{torch::ones({2}), parameter}, Communicator(),
                                          torch::optim::SGDOptions(1));
    });
  };
  expect_says(take(torch::ones({3}, at::kHalf)), "parameter 1 is Half [3]; it must be float or double");
  expect_says(take(torch::ones({4, 4}).slice(1, 0, 2)), "parameter 1 is Float [4, 2] with gaps in its memory");
  const auto twice = torch::ones({3});
  expect_says(message_of<InvalidArgument>([&] {
                ShardedOptimizer<torch::optim::SGD>(std::vector<at::Tensor>{twice, twice}, Communicator(),
                                                    torch::optim::SGDOptions(1));
              }),
              "parameter 1 is there twice");
  collective::on_ranks(2, [](const Group& group) {
    expect_says(message_of<InvalidArgument>([&] {
                  ShardedOptimizer<torch::optim::SGD>(std::vector<at::Tensor>{torch::ones({2 + group.rank()})}, group,
                                                      torch::optim::SGDOptions(1));
                }),
                "parameters of ShardedOptimizer differ: rank 0 has parameter 0: Float [2]");
  });
}

TEST(ShardedOptimizer, SaysWhenParametersOrRanksAreOthers) {
  auto net = make_sharded_net();
  ShardedOptimizer<torch::optim::SGD> moved(net->parameters(), Communicator(), torch::optim::SGDOptions(1));
  net->first->weight.set_data(net->first->weight.clone());
  expect_says(message_of<Error>([&] { moved.step(); }), "was moved to other memory");

  const Communicator ranks;
  ShardedOptimizer<torch::optim::SGD> of_lost(net->parameters(), ranks, torch::optim::SGDOptions(1));
  const auto before = net->second->weight.detach().clone();
  sharded_loss_of(net, 0, 0).backward();
  ranks.regroup(make_thread_groups(1)[0]);
  expect_says(message_of<Error>([&] { of_lost.step(); }), "ranks were lost");
  EXPECT_TRUE(torch::equal(net->second->weight, before));
  expect_says(message_of<Error>([&] { of_lost.consolidate(); }), "ranks were lost");
}

// A module that names a parameter twice.
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    inner = register_module("inner", torch::nn::Linear(20, 20));
    register_parameter("tied", inner->weight);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(inner(x)); }
  torch::nn::Linear inner = nullptr;
};
TORCH_MODULE(Tied);

TEST(ShardedOptimizer, TiedParametersAreOne) {
  const auto x = at::sin(at::arange(80, at::kDouble).view({4, 20}));
  collective::on_ranks(2, [&](const Group& group) {
    const auto make = [] {
      const std::lock_guard lock(making);
      torch::manual_seed(3);
      return Tied();
    };
    auto alone = make(), net = make();
    torch::optim::Adam adam({alone->inner->weight, alone->inner->bias}, torch::optim::AdamOptions(1e-2));
    DistributedDataParallel ddp(net, group, {.timeout_seconds = 30});
    ShardedOptimizer<torch::optim::Adam> sharded(ddp, torch::optim::AdamOptions(1e-2));
    for (int step = 0; step < 10; ++step) {
      adam.zero_grad();
      alone(x).pow(2).sum().backward();
      adam.step();
      sharded.zero_grad();
      ddp(x).pow(2).sum().backward();
      sharded.step();
    }
    EXPECT_LE(largest_difference(net->inner->parameters(), alone->inner->parameters()), 1e-9);
  });
}

}  // namespace
}  // namespace lockstep::ddp
