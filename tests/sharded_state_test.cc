// MultiWorkerMirroredStrategy with shard_optimizer_state: the weights of training without it, from a share of the
// memory.
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <set>

#include "base/expect_says_testing.h"
#include "base/text.h"
#include "gradient/gradient_path.h"
#include "gradient/net_testing.h"
#include "strategy/unwrap.h"
#include "tests/workers.h"

namespace lockstep {
namespace {

// Parameters of several kinds: frozen between trainable ones, tied, used in some batches only, and never.
struct MixedImpl : torch::nn::Module {
  explicit MixedImpl(at::ScalarType dtype) {
    first = register_module("first", torch::nn::Linear(6, 70));
    frozen = register_module("frozen", torch::nn::Linear(70, 70));
    for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
    rarely = register_module("rarely", torch::nn::Linear(70, 70));
    never = register_module("never", torch::nn::Linear(70, 70));
    last = register_module("last", torch::nn::Linear(70, 3));
    register_parameter("tied", first->weight);
    to(dtype);
  }
  Tensor forward(const Tensor& x) {
    const auto h = torch::tanh(frozen(torch::tanh(first(x))));
    const auto large = (x.select(1, 0) > 1.5).any().item<bool>();  // in some parts of some batches only
    return last(large ? h + rarely(h) : h);
  }
  torch::nn::Linear first = nullptr, frozen = nullptr, rarely = nullptr, never = nullptr, last = nullptr;
};

struct Trained {
  std::vector<Tensor> weights;
  std::int64_t state_bytes = 0;
};

class ShardedState : public testing::Test {
 protected:
  static constexpr int kSteps = 50;

  Trained train(const Strategy& strategy, const Optimizer& optimizer, at::ScalarType dtype) {
    const auto scope = strategy.scope();
    Model model([dtype] { return std::make_shared<MixedImpl>(dtype); });
    model.compile({.optimizer = optimizer, .loss = SparseCategoricalCrossentropy({.from_logits = true})});
    model.load_weights(initial(dtype));
    model.fit(make_data_once(dtype), {.verbose = 0, .steps_per_epoch = kSteps});
    EXPECT_EQ(model.iterations(), kSteps);
    for (int r = 1; r < strategy.num_local_replicas(); ++r) {
      EXPECT_TRUE(equal_bits(weights_of(model, r), weights_of(model)));
    }
    return {weights_of(model), model.optimizer().state_bytes()};
  }

  // Trains on all workers, whose results must be equal; returns the chief's.
  Trained train_on(const WorkerOptions& options, const Optimizer& optimizer, at::ScalarType dtype) {
    initial(dtype);
    make_data_once(dtype);
    Collected<Trained> trained;
    expect_no_errors(
        run_workers(options, [&](const auto& strategy) { trained.add(strategy, train(strategy, optimizer, dtype)); }));
    EXPECT_EQ(trained.values().size(), static_cast<std::size_t>(options.workers));
    Trained result{trained.chiefs()};
    for (const auto& [rank, own] : trained.values()) {
      EXPECT_TRUE(equal_bits(own.weights, trained.chiefs().weights)) << rank;
      result.state_bytes = std::max(result.state_bytes, own.state_bytes);
    }
    return result;
  }

  // One file, and one data set, for all workers, which are threads.
  std::string initial(at::ScalarType dtype) {
    const auto path = text(testing::TempDir(), "/sharded_state_", dtype);
    if (written_.insert(dtype).second) {
      Model model([dtype] { return std::make_shared<MixedImpl>(dtype); });
      model.save_weights(path);
    }
    return path;
  }
  Dataset make_data_once(at::ScalarType dtype) {
    const auto made = data_.find(dtype);
    if (made != data_.end()) return made->second;
    return data_.emplace(dtype, make_data(dtype, true).shuffle(26, {.seed = 3}).batch(7).repeat()).first->second;
  }

 private:
  std::set<at::ScalarType> written_;
  std::map<at::ScalarType, Dataset> data_;
};

TEST_F(ShardedState, EveryRuleGivesTheWeightsOfTrainingWithoutIt) {
  for (const auto& [name, optimizer] : gradient::optimizers()) {
    const auto whole = train_on({.workers = 2}, optimizer, at::kDouble);
    for (const int workers : {2, 3, 4}) {
      for (const int replicas : {1, 2}) {
        SCOPED_TRACE(testing::Message() << name << ", " << workers << " workers of " << replicas << " replicas");
        const auto sharded =
            train_on({.workers = workers, .replicas = replicas, .shard_optimizer_state = true}, optimizer, at::kDouble);
        EXPECT_LE(largest_difference(sharded.weights, whole.weights), 1e-9);
        EXPECT_LE(static_cast<double>(sharded.state_bytes), static_cast<double>(whole.state_bytes) / workers * 1.05);
      }
    }
    SCOPED_TRACE(testing::Message() << name << ", 3 workers on hosts of their own");
    const auto apart =
        train_on({.workers = 3, .hosts_differ = true, .shard_optimizer_state = true}, optimizer, at::kDouble);
    EXPECT_LE(largest_difference(apart.weights, whole.weights), 1e-9);
    EXPECT_LE(static_cast<double>(apart.state_bytes), static_cast<double>(whole.state_bytes) / 3 * 1.05);
  }
}

// A worker has its share, and a copy of another one's.
TEST_F(ShardedState, ElasticWorkersHaveTwoShares) {
  for (const auto& [name, optimizer] : gradient::optimizers()) {
    SCOPED_TRACE(name);
    const auto whole = train_on({.workers = 2}, optimizer, at::kDouble);
    for (const int replicas : {1, 2}) {
      const auto sharded = train_on(
          {.workers = 4, .replicas = replicas, .shard_optimizer_state = true, .elastic = true}, optimizer, at::kDouble);
      EXPECT_LE(largest_difference(sharded.weights, whole.weights), 1e-9);
      EXPECT_LE(static_cast<double>(sharded.state_bytes), static_cast<double>(whole.state_bytes) / 2 * 1.05);
    }
  }
  const auto sgd = SGD({.learning_rate = 0.05, .momentum = 0.9});
  const auto floats = train_on({.workers = 2}, sgd, at::kFloat);
  WorkerOptions options{.workers = 3, .hosts_differ = true, .shard_optimizer_state = true, .elastic = true};
  options.communication.gradient_dtype = DType::bfloat16;
  EXPECT_LE(largest_difference(train_on(options, sgd, at::kFloat).weights, floats.weights), 1e-2);
}

TEST_F(ShardedState, SmallBucketsOverANetworkAndGradientsOfFewerBits) {
  const auto adam = Adam({.learning_rate = 0.01, .epsilon = 1e-2, .global_clipnorm = 0.5});
  WorkerOptions options{.workers = 3, .replicas = 2, .hosts_differ = true, .shard_optimizer_state = true};
  options.communication.bucket_cap_mb = options.communication.first_bucket_mb = 1e-4;
  const auto whole = train_on({.workers = 2}, adam, at::kDouble);
  EXPECT_LE(largest_difference(train_on(options, adam, at::kDouble).weights, whole.weights), 1e-9);
  const auto sgd = SGD({.learning_rate = 0.05});
  const auto floats = train_on({.workers = 2}, sgd, at::kFloat);
  for (const bool hosts_differ : {false, true}) {
    options.hosts_differ = hosts_differ;
    for (const auto dtype : {DType::bfloat16, DType::float16, DType::int8}) {
      options.communication.gradient_dtype = dtype;
      EXPECT_LE(largest_difference(train_on(options, sgd, at::kFloat).weights, floats.weights), 1e-2);
    }
  }
}

// Runs a loop in which worker 1 does `damage` between the fifth and the sixth step. Returns what each worker threw.
std::vector<std::string> run_with_damage(
    bool hosts_differ, const std::function<void(Mirrored<torch::nn::Linear>&, const ReplicatedOptimizer&)>& damage) {
  return run_workers(
      {.workers = 3, .hosts_differ = hosts_differ, .shard_optimizer_state = true},
      [&](const MultiWorkerMirroredStrategy& strategy) {
        auto net = strategy.replicate([] { return torch::nn::Linear(40, 40); });
        const auto optimizer = strategy.optimizer(Adam(), net);
        for (int step = 0; step < 12; ++step) {
          if (step == 5 && strategy.worker_rank() == 1) damage(net, optimizer);
          strategy.run(
              [&](ReplicaContext& replica, torch::nn::Linear& linear) {
                optimizer.minimize(replica, linear(torch::ones({2, 40})).pow(2).sum(), 2);
              },
              net);
        }
      },
      /*compare_copies_every=*/3);
}

// The parameter: true where workers are on hosts of their own. Values are then gathered over a network, else written
// into shared memory.
class ShardedStateOnHosts : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Hosts, ShardedStateOnHosts, testing::Bool(),
                         [](const auto& test) { return test.param ? "differ" : "same"; });

// Damages values as a broken processor would. They reach all where they are of the worker's own shard.
TEST_P(ShardedStateOnHosts, ValuesAreComparedAsTheyWereGathered) {
  for (const std::int64_t element : {0, 800, 1599}) {
    const auto errors = run_with_damage(GetParam(), [&](auto& net, const auto&) {
      const at::NoGradGuard no_grad;
      net[0]->weight.view({-1})[element].add_(1e-3);
    });
    for (const auto& error : errors) {
      expect_says(error, "the workers' copies differ: worker 0 has weight with the hash ");
      expect_says(error, ", worker 1 has weight with the hash ");
    }
  }
}

TEST_P(ShardedStateOnHosts, StateIsComparedWithWhatTheLastStepLeft) {
  const auto errors = run_with_damage(
      GetParam(), [](auto&, const auto& optimizer) { unwrap(optimizer).updater().state(0, 1).add_(1e-3); });
  for (const auto& error : errors) {
    expect_says(error, "the workers' optimizer states differ: worker 0 has a state as its last step left it, worker 1");
  }
}

// Each optimizer has state of its own, and both move the same weights.
TEST_P(ShardedStateOnHosts, TwoOptimizersOfOneModelTakeTurns) {
  const auto weights = [&](bool sharded) {
    Collected<Tensor> trained;
    const WorkerOptions options{.replicas = 2, .hosts_differ = GetParam(), .shard_optimizer_state = sharded};
    expect_no_errors(run_workers(options, [&](const auto& strategy) {
      auto net = strategy.replicate([] {
        torch::nn::Linear linear(40, 40);
        linear->to(at::kDouble);
        const at::NoGradGuard no_grad;
        for (auto& parameter : linear->parameters()) parameter.fill_(0.01);
        return linear;
      });
      const auto adam = strategy.optimizer(Adam(), net);
      const auto sgd = strategy.optimizer(SGD({.momentum = 0.9}), net);
      for (int step = 0; step < 10; ++step) {
        strategy.run(
            [&](ReplicaContext& replica, torch::nn::Linear& linear) {
              const auto x = torch::arange(40, at::kDouble) / 40 + replica.replica_id() + step;
              (step % 3 == 0 ? sgd : adam).minimize(replica, linear(x).pow(2).mean(), 1);
            },
            net);
      }
      trained.add(strategy, net[0]->weight.detach().clone());
    }));
    return trained.chiefs();
  };
  const auto whole = weights(false);
  EXPECT_GT((whole - 0.01).abs().min().template item<double>(), 1e-4);  // all have moved
  EXPECT_LE((weights(true) - whole).abs().max().template item<double>(), 1e-9);
}

// One worker's gradients of one step are not finite: all skip it, also those whose shards have finite sums.
TEST_P(ShardedStateOnHosts, AStepWhoseGradientsAreNotFiniteChangesNothing) {
  const WorkerOptions options{.workers = 2, .hosts_differ = GetParam(), .shard_optimizer_state = true};
  expect_no_errors(run_workers(options, [](const auto& strategy) {
    auto net = strategy.replicate([] { return torch::nn::Linear(40, 40); });
    const auto optimizer = strategy.optimizer(LossScaleOptimizer(SGD()), net);
    const auto step = [&](double factor) {
      strategy.run(
          [&](ReplicaContext& replica, torch::nn::Linear& linear) {
            auto out = linear(torch::ones({2, 40})) * 1.0;
            out.select(1, 39).mul_(factor);  // the last row of the weights, which are worker 1's
            optimizer.minimize(replica, out.pow(2).sum(), 2);
          },
          net);
    };
    step(1);
    const auto before = net[0]->weight.clone();
    const auto scale = optimizer.loss_scale();
    step(strategy.worker_rank() == 0 ? INFINITY : 1);
    EXPECT_TRUE(torch::equal(net[0]->weight, before));
    EXPECT_EQ(optimizer.loss_scale(), scale / 2);
    EXPECT_EQ(optimizer.iterations(), 1);
    step(1);
    EXPECT_FALSE(torch::equal(net[0]->weight, before));
  }));
}

TEST(ShardedStateOptions, AreTheSameOnAllWorkers) {
  const auto store = Store::hold("127.0.0.1:0");
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      expect_says(message_of<InvalidArgument>([&] {
                    const MultiWorkerMirroredStrategy strategy(
                        {.devices = {"cpu:0"},
                         .cluster = Cluster{.world = {.rank = rank, .size = 2}, .store = store.address()},
                         .shard_optimizer_state = rank == 1});
                  }),
                  "the workers' strategies differ: worker 0 has shard_optimizer_state false, worker 1 has "
                  "shard_optimizer_state true");
    });
  }
}

}  // namespace
}  // namespace lockstep
