// Strategies as a custom loop uses them: run, reduce, gather, collectives, variables, distribution, failures.
#include "lockstep/strategy/strategy.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/nn/modules/linear.h>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "base/child_process_testing.h"
#include "base/expect_says_testing.h"
#include "data/stored_tensor.h"
#include "lockstep/base/error.h"
#include "lockstep/base/random.h"
#include "lockstep/strategy/variable.h"

namespace lockstep::strategy {
namespace {

Tensor number(double value) { return at::scalar_tensor(value, at::kDouble); }

TEST(Strategy, RunGivesEachReplicaItsOwn) {
  const MirroredStrategy strategy(3);
  EXPECT_EQ(strategy.num_replicas_in_sync(), 3);
  EXPECT_EQ(strategy.devices(), (std::vector<std::string>{"cpu:0", "cpu:1", "cpu:2"}));
  PerReplica<int> values({10, 20, 30});
  const auto results = strategy.run(
      [](ReplicaContext& replica, int& own, int shared) {
        EXPECT_EQ(replica.num_replicas_in_sync(), 3);
        EXPECT_EQ(replica.device(), "cpu:" + std::to_string(replica.replica_id()));
        ++own;
        return own + shared;
      },
      values, 100);
  EXPECT_EQ(results[0], 111);
  EXPECT_EQ(results[2], 131);
  EXPECT_EQ(values[1], 21);
  std::atomic<int> calls = 0;
  strategy.run([&](ReplicaContext&) { ++calls; });  // void
  EXPECT_EQ(calls, 3);
}

TEST(Strategy, RunCarriesTheCallersGradMode) {
  const MirroredStrategy strategy(2);
  const at::NoGradGuard no_grad;
  strategy.run([](ReplicaContext&) { EXPECT_FALSE(at::GradMode::is_enabled()); });
}

TEST(Strategy, ReduceAndGather) {
  const MirroredStrategy strategy(3);
  const PerReplica<Tensor> values({at::tensor({1.0, 5.0}), at::tensor({2.0, -1.0}), at::tensor({3.0, 2.0})});
  EXPECT_TRUE(at::equal(strategy.reduce(ReduceOp::sum, values), at::tensor({6.0, 6.0})));
  EXPECT_TRUE(at::equal(strategy.reduce(ReduceOp::mean, values), at::tensor({2.0, 2.0})));
  EXPECT_TRUE(at::equal(strategy.reduce(ReduceOp::min, values), at::tensor({1.0, -1.0})));
  EXPECT_TRUE(at::equal(strategy.reduce(ReduceOp::max, values), at::tensor({3.0, 5.0})));
  EXPECT_TRUE(at::equal(strategy.reduce(ReduceOp::product, values), at::tensor({6.0, -10.0})));
  EXPECT_TRUE(at::equal(strategy.gather(values), at::tensor({1.0, 5.0, 2.0, -1.0, 3.0, 2.0})));
  EXPECT_EQ(strategy.reduce(ReduceOp::mean, PerReplica<double>({1, 2, 6})), 3);
}

TEST(Strategy, ReduceRefusesUnevenValues) {
  const MirroredStrategy strategy(2);
  for (const auto& uneven : {at::ones({3}), at::ones({1}), at::ones({2}, at::kLong)}) {
    const auto said = message_of<InvalidArgument>([&] {
      strategy.reduce(ReduceOp::sum, PerReplica<Tensor>({at::ones({2}), uneven}));
    });
    expect_says(said, "replica 0's value is Float [2], replica 1's ");
    expect_says(said, "Strategy::gather takes uneven ones");
  }
}

TEST(Strategy, ReplicasReduceAndGatherAmongThemselves) {
  const MirroredStrategy strategy(3);
  strategy.run([](ReplicaContext& replica) {
    const auto own = at::full({2, 1}, replica.replica_id(), at::kFloat);
    EXPECT_TRUE(at::equal(replica.all_reduce(ReduceOp::sum, own), at::full({2, 1}, 3.0F)));
    EXPECT_EQ(own[0].item<float>(), static_cast<float>(replica.replica_id()));  // not changed
    EXPECT_TRUE(at::equal(replica.all_gather(own, 1), at::tensor({0.0F, 1.0F, 2.0F, 0.0F, 1.0F, 2.0F}).view({2, 3})));
    EXPECT_TRUE(at::equal(replica.all_reduce(ReduceOp::max, own.t()), at::full({1, 2}, 2.0F)));
  });
}

TEST(Strategy, TheInnermostScopeWins) {
  EXPECT_EQ(Strategy::current().num_replicas_in_sync(), 1);
  const MirroredStrategy outer(2), inner(3);
  {
    const auto scope = outer.scope();
    {
      const auto nested = inner.scope();
      EXPECT_EQ(Strategy::current().num_replicas_in_sync(), 3);
    }
    EXPECT_EQ(Strategy::current().num_replicas_in_sync(), 2);
    std::jthread([] { EXPECT_EQ(Strategy::current().num_replicas_in_sync(), 1); }).join();
  }
  EXPECT_EQ(Strategy::current().num_replicas_in_sync(), 1);
}

TEST(Strategy, WhatAReplicaThrowsComesOutAndTheStrategyStaysUsable) {
  const MirroredStrategy strategy(3);
  for (int round = 0; round < 20; ++round) {
    try {
      strategy.run([&](ReplicaContext& replica) {
        if (replica.replica_id() == round % 3) throw std::out_of_range("round " + std::to_string(round));
        replica.all_reduce(ReduceOp::sum, number(1));  // the others wait for it
      });
      FAIL() << "nothing was thrown";
    } catch (const std::out_of_range& error) {
      EXPECT_EQ(error.what(), "round " + std::to_string(round));
    }
    strategy.run(
        [](ReplicaContext& replica) { EXPECT_EQ(replica.all_reduce(ReduceOp::sum, number(1)).item<double>(), 3); });
  }
}

TEST(Strategy, AReplicaThatNeverComesIsADeadlineExceeded) {
  const MirroredStrategy strategy({.devices = {"cpu:0", "cpu:1"}, .timeout_seconds = 0.05});
  EXPECT_THROW(strategy.run([](ReplicaContext& replica) {
    if (replica.replica_id() == 0) replica.group().barrier(replica.deadline());
  }),
               DeadlineExceeded);
}

TEST(Strategy, RandomNumbersAreTheReplicasOwn) {
  const auto draw = [] {
    set_random_seed(4);
    const MirroredStrategy strategy(2);
    const auto first = strategy.run([](ReplicaContext&) { return at::rand({4}); });
    const auto second = strategy.run([](ReplicaContext&) { return at::rand({4}); });
    return std::vector<Tensor>{first[0], first[1], second[0], second[1]};
  };
  const auto once = draw();
  const auto again = draw();
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(at::equal(once[i], again[i]));
    for (std::size_t j = 0; j < i; ++j) EXPECT_FALSE(at::equal(once[i], once[j]));
  }
}

TEST(Distribute, SplitsBatchesInOrder) {
  const MirroredStrategy strategy(3);
  const auto data = Dataset::from_tensor_slices(at::arange(12), at::arange(12)).batch(10);
  std::vector<std::vector<std::int64_t>> sizes;
  Tensor seen = at::empty({0}, at::kLong);
  for (auto& batch : strategy.distribute(data)) {
    sizes.push_back({batch[0].size(), batch[1].size(), batch[2].size()});
    for (const auto& part : batch) seen = at::cat({seen, part.x});
  }
  EXPECT_EQ(sizes, (std::vector<std::vector<std::int64_t>>{{4, 3, 3}, {1, 1, 0}}));
  EXPECT_TRUE(at::equal(seen, at::arange(12)));
}

TEST(Distribute, FromAFunctionGivesEachReplicaABatch) {
  const MirroredStrategy strategy(2);
  const auto distributed = strategy.distribute_from_function([](const InputContext& context) {
    EXPECT_EQ(context.num_input_pipelines, 1);
    return Dataset::from_tensor_slices(at::arange(10)).batch(context.get_per_replica_batch_size(8));
  });
  EXPECT_EQ(distributed.cardinality(), 2);
  std::vector<std::int64_t> sizes;
  for (auto& batch : distributed) sizes.insert(sizes.end(), {batch[0].size(), batch[1].size()});
  EXPECT_EQ(sizes, (std::vector<std::int64_t>{4, 4, 2, 0}));
  EXPECT_THROW((InputContext{.num_replicas_in_sync = 3}.get_per_replica_batch_size(8)), InvalidArgument);
}

TEST(Distribute, DataThatIsNotBatchedIsAnError) {
  const MirroredStrategy strategy(2);
  EXPECT_THROW(strategy.distribute(Dataset::from_tensor_slices(at::arange(10))).iterate().next(), InvalidArgument);
}

struct Case {
  VariableSynchronization synchronization;
  VariableAggregation aggregation;
  double in_step;  // replica 1's copy after replica r assigned r + 1
  double read;
};

TEST(Variable, AggregatesOnWriteOrOnRead) {
  using S = VariableSynchronization;
  using A = VariableAggregation;
  const MirroredStrategy strategy(3);
  for (const auto& c : {Case{S::on_write, A::sum, 6, 6}, Case{S::on_write, A::mean, 2, 2},
                        Case{S::on_write, A::only_first_replica, 1, 1}, Case{S::on_read, A::sum, 2, 6},
                        Case{S::on_read, A::mean, 2, 2}, Case{S::on_read, A::only_first_replica, 2, 1}}) {
    const Variable variable(number(0), {c.synchronization, c.aggregation}, strategy);
    strategy.run([&](ReplicaContext& replica) {
      variable.assign(replica, number(replica.replica_id() + 1));
      if (replica.replica_id() == 1) {
        EXPECT_EQ(variable.value(replica).item<double>(), c.in_step);
      }
    });
    EXPECT_EQ(variable.read().item<double>(), c.read);
    variable.assign(number(12));
    EXPECT_EQ(variable.read().item<double>(), 12);
    strategy.run([&](ReplicaContext& replica) { variable.assign_add(replica, number(replica.replica_id() + 1)); });
    EXPECT_EQ(variable.read().item<double>(), 12 + c.read);
  }
}

TEST(Variable, WithoutAggregationAStepMayNotAssign) {
  const MirroredStrategy strategy(2);
  const Variable variable(number(5), {}, strategy);
  EXPECT_THROW(strategy.run([&](ReplicaContext& replica) { variable.assign(replica, number(1)); }), InvalidArgument);
  EXPECT_EQ(variable.read().item<double>(), 5);
  EXPECT_THROW(variable.assign(at::ones({2})), InvalidArgument);
}

TEST(Variable, IsSavedAndRestored) {
  const MirroredStrategy strategy(2);
  const Variable variable(number(5), {VariableSynchronization::on_read, VariableAggregation::sum}, strategy);
  EXPECT_EQ(variable.read().item<double>(), 5);
  Archive archive;
  variable.trackable().save(archive, "v");
  variable.assign(number(0));
  variable.trackable().load(archive, "v")();
  EXPECT_EQ(variable.read().item<double>(), 5);
}

TEST(Strategy, AnIteratorMayBeReadByAnotherThreadThanRunsTheSteps) {
  const MirroredStrategy strategy(2);
  const auto data = strategy.distribute(Dataset::from_tensor_slices(at::arange(4000)).batch(4));
  std::atomic<int> bad = 0;
  std::jthread reader([&] {
    auto iterator = data.iterate();
    for (std::int64_t first = 0; auto batch = iterator.next(); first += 4) {
      if ((*batch)[0].x[0].item<std::int64_t>() != first || (*batch)[1].x[1].item<std::int64_t>() != first + 3) ++bad;
    }
  });
  for (int i = 0; i < 1000; ++i) {
    const auto ids = strategy.run([](ReplicaContext& replica) { return replica.replica_id(); });
    if (ids[0] != 0 || ids[1] != 1) ++bad;
  }
  reader.join();
  EXPECT_EQ(bad, 0);
}

TEST(Strategy, TwoThreadsAtOnceAreRefused) {
  const MirroredStrategy strategy(2);
  strategy.run([&](ReplicaContext& replica) {
    if (replica.replica_id() != 0) return;
    std::jthread other([&] { EXPECT_THROW(strategy.run([](ReplicaContext&) {}), InvalidArgument); });
  });
}

TEST(ReplicatedOptimizer, NonsenseIsRefused) {
  const MirroredStrategy strategy(1);
  const auto net = strategy.replicate([] { return torch::nn::Linear(2, 2); });
  const auto optimizer = strategy.optimizer(SGD(), net);
  const auto minimize = [&](const Tensor& loss, double weight) {
    strategy.run([&](ReplicaContext& replica) { optimizer.minimize(replica, loss, weight); });
  };
  const auto loss = at::ones({}).requires_grad_() * 2;
  EXPECT_THROW(minimize(loss, -1), InvalidArgument);
  EXPECT_THROW(minimize(at::ones({3}).requires_grad_() * 2, 1), InvalidArgument);
  EXPECT_THROW(minimize(at::ones({}), 1), InvalidArgument);
  EXPECT_THROW(minimize({}, 1), InvalidArgument);
}

// Small integers and bools are kept as they are. Files of earlier versions have them in wider dtypes, and are read too.
TEST(Replicated, SmallDtypesAreKeptAsTheyAreAndTakenAsTheyWereKept) {
  struct Module : torch::nn::Module {
    Module() {
      register_buffer("flag", at::tensor({1, 0}).to(at::kBool));
      register_buffer("small", at::tensor({-3, 300}).to(at::kShort));
    }
  };
  const OneDeviceStrategy strategy("cpu:0");
  const auto saved = strategy.replicate([] { return std::make_shared<Module>(); });
  Archive archive;
  saved.trackable().save(archive, "");
  EXPECT_EQ(archive.tensors.at("flag").dtype, DType::boolean);
  EXPECT_EQ(archive.tensors.at("small").dtype, DType::int16);

  auto loaded = strategy.replicate([] { return std::make_shared<Module>(); });
  const auto flag = loaded[0]->buffers()[0], small = loaded[0]->buffers()[1];
  const auto load_into_zeros = [&] {
    flag.zero_();
    small.zero_();
    loaded.trackable().load(archive, "")();
    EXPECT_TRUE(at::equal(flag, at::tensor({1, 0}).to(at::kBool)));
    EXPECT_TRUE(at::equal(small, at::tensor({-3, 300}).to(at::kShort)));
  };
  load_into_zeros();
  archive.tensors.at("flag").dtype = DType::uint8;
  archive.tensors["small"] = data::to_stored(at::tensor({-3, 300}, at::kInt));
  load_into_zeros();
  archive.tensors["flag"] = data::to_stored(at::zeros({2}));
  EXPECT_THROW(loaded.trackable().load(archive, ""), InvalidArgument);
}

// The user may have few threads. The process that tries it ends, and does not wait for threads that never came.
TEST(Strategy, AThreadThatCannotBeStartedIsAnError) {
  ChildProcess few([]() -> std::string {
    const rlimit threads{3, 3};
    if (setrlimit(RLIMIT_NPROC, &threads) != 0 || ::setuid(65534) != 0) return "no limit";
    ::alarm(20);
    try {
      MirroredStrategy strategy(16);
    } catch (const Error& error) {
      return error.what();
    }
    return "all were started";
  });
  const auto said = few.said();
  EXPECT_NE(said.find("cannot start the thread of replica"), std::string::npos) << said;
}

}  // namespace
}  // namespace lockstep::strategy
