// Tests ClusterCoordinator's promises, with the processes of the job as threads that call each other over loopback.
#include "lockstep/servers/cluster_coordinator.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include <atomic>
#include <set>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "tests/server_job.h"

namespace lockstep {
namespace {

using Tensors = std::vector<Tensor>;

// A weight that a step moves by the number that it is scheduled with.
struct Counter {
  explicit Counter(const ParameterServerStrategy& of)
      : strategy(of),
        net(of.replicate([] {
          torch::nn::Linear made(torch::nn::LinearOptions(1, 1).bias(false));
          made->to(torch::kDouble);
          const at::NoGradGuard no_grad;
          made->weight.zero_();
          return made;
        })),
        optimizer(of.optimizer(SGD({.learning_rate = 1}), net)) {}

  Tensors add(const Tensors& arguments) {
    const auto results = strategy.run(
        [&](ReplicaContext& replica, torch::nn::Linear& own) {
          const auto before = own->weight.item<double>();
          optimizer.minimize(replica, -(own->weight * arguments.at(0)).sum(), 1);
          return before;
        },
        net);
    return {at::scalar_tensor(results[0], at::kDouble), arguments.at(0)};
  }

  double value() { return net[0]->weight.item<double>(); }

  ParameterServerStrategy strategy;
  Mirrored<torch::nn::Linear> net;
  ReplicatedOptimizer optimizer;
};

Tensor number(double value) { return at::scalar_tensor(value, at::kDouble); }

TEST(ClusterCoordinator, StepsAreComputedOnceAndTheirResultsFetched) {
  for (const int workers : {1, 3}) {
    expect_no_error(run_job({.workers = workers, .servers = 2}, [&](const auto& strategy) {
      Counter counter(strategy);
      ClusterCoordinator coordinator(strategy);
      coordinator.define("add", [&](const Tensors& arguments) { return counter.add(arguments); });
      for (int run = 1; run <= 2; ++run) {  // steps of a second run are others
        coordinator.run([&] {
          std::vector<RemoteValue> values;
          for (int i = 1; i <= 100; ++i) values.push_back(coordinator.schedule("add", {number(i)}));
          coordinator.join();
          EXPECT_TRUE(coordinator.done());
          for (int i = 1; i <= 100; ++i) {
            const auto result = coordinator.fetch(values[static_cast<std::size_t>(i - 1)]);
            ASSERT_EQ(result.size(), 2U);
            EXPECT_EQ(result[1].template item<double>(), i);
          }
          if (run == 1) return;  // with the values that it began with here, the chief changes nothing on the servers
          coordinator.pull_variables();
          EXPECT_EQ(counter.value(), run * 5050.0);
        });
      }
    }));
  }
}

// Only what has changed on the servers is fetched; what a step changes by itself is not kept.
TEST(ClusterCoordinator, AStepBeginsWithTheServersValues) {
  expect_no_error(run_job({.workers = 1}, [&](const auto& strategy) {
    Counter counter(strategy);
    ClusterCoordinator coordinator(strategy);
    coordinator.define("add", [&](const Tensors& arguments) { return counter.add(arguments); });
    coordinator.define("read", [&](const Tensors&) { return Tensors{number(counter.value())}; });
    coordinator.define("spoil", [&](const Tensors&) {
      const at::NoGradGuard no_grad;
      counter.net[0]->weight.fill_(99);
      return Tensors();
    });
    coordinator.run([&] {
      const auto read = [&] { return coordinator.schedule("read").fetch()[0].template item<double>(); };
      EXPECT_EQ(read(), 0);
      coordinator.schedule("spoil").fetch();
      EXPECT_EQ(read(), 0);
      coordinator.schedule("add", {number(3)}).fetch();
      EXPECT_EQ(read(), 3);
      EXPECT_EQ(read(), 3);
    });
  }));
}

TEST(ClusterCoordinator, AStepsErrorComesOutOfJoinAndFetchAndCancelsThoseThatWait) {
  const auto errors = run_job({.workers = 1}, [&](const auto& strategy) {
    ClusterCoordinator coordinator(strategy);
    std::atomic<int> computed = 0;
    coordinator.define("fails", [](const Tensors&) -> Tensors { throw Error("no such file"); });
    coordinator.define("counts", [&](const Tensors&) -> Tensors {
      ++computed;
      return {};
    });
    EXPECT_THROW(coordinator.define("counts", {}), InvalidArgument);
    coordinator.run([&] {
      const auto failed = coordinator.schedule("fails");
      std::optional<RemoteValue> last;
      try {  // the failure may be known before the last one is scheduled
        for (int i = 0; i < 200; ++i) last = coordinator.schedule("counts");
        coordinator.join();
        ADD_FAILURE() << "join threw nothing";
      } catch (const Error& error) {
        expect_says(error.what(), "worker 0 in the step \"fails\": no such file");
      }
      coordinator.join();  // nobody is told twice
      expect_says(message_of<Error>([&] { coordinator.fetch(failed); }), "no such file");
      const auto after = coordinator.schedule("counts");
      EXPECT_TRUE(after.fetch().empty());
      expect_says(message_of<InvalidArgument>([&] { coordinator.schedule("what"); }),
                  "no step \"what\" is defined; there are \"counts\", \"fails\"");
    });
    expect_says(message_of<InvalidArgument>([&] { coordinator.schedule("counts"); }), "the chief");
    coordinator.run([] { throw Error("the program failed"); });
  });
  EXPECT_EQ(errors.size(), 3U);
  for (const auto& error : errors) expect_says(error, "the program failed");
}

TEST(ClusterCoordinator, StepsThatNobodyBeganAreCancelledWhenTheProgramEnds) {
  expect_no_error(run_job({.workers = 1}, [&](const auto& strategy) {
    ClusterCoordinator coordinator(strategy);
    coordinator.define("nothing", [](const Tensors&) { return Tensors(); });
    std::optional<RemoteValue> last;
    coordinator.run([&] {
      for (int i = 0; i < 200; ++i) last = coordinator.schedule("nothing");
    });
    if (strategy.is_chief()) {
      EXPECT_THROW(last->fetch(), Aborted);
    }
  }));
}

TEST(ClusterCoordinator, EachWorkerWalksItsOwnData) {
  expect_no_error(run_job({.workers = 2, .options = {.devices = {"cpu:0", "cpu:1"}}}, [&](const auto& strategy) {
    ClusterCoordinator coordinator(strategy);
    auto batches = coordinator.create_per_worker_dataset([](const InputContext& context) {
      EXPECT_EQ(context.num_input_pipelines, 2);
      return Dataset::from_tensor_slices(at::arange(8)).shard(2, context.input_pipeline_id).batch(1);
    });
    coordinator.define("next", [&](const Tensors&) {
      Tensors xs;
      const auto batch = *batches.local().next();
      for (const auto& part : batch) xs.push_back(part.x);
      return xs;
    });
    coordinator.run([&] {
      std::vector<RemoteValue> values;
      for (int i = 0; i < 2; ++i) values.push_back(coordinator.schedule("next"));
      std::set<std::int64_t> seen;
      for (const auto& value : values) {
        for (const auto& x : value.fetch()) seen.insert(x.template item<std::int64_t>());
      }
      EXPECT_EQ(seen.size(), 4U);  // whichever worker computed what
    });
  }));
}

// A linear model of the rows of a table, whose rate falls with each update.
struct Rows : torch::nn::Module {
  Rows() {
    register_module("rows", rows.ptr());
    register_module("linear", linear);
    linear->to(torch::kDouble);
    const at::NoGradGuard no_grad;
    linear->weight.fill_(0.5);
  }
  ShardedEmbedding rows{100, 3, {.dtype = DType::float64, .seed = 7}};
  torch::nn::Linear linear{torch::nn::LinearOptions(3, 1).bias(false)};
};

// Trains steps begin to end of a loop that also schedules steps without an update; `body` runs before and after.
struct RowsLoop {
  explicit RowsLoop(const ParameterServerStrategy& of)
      : strategy(of), net(of.replicate([] { return std::make_shared<Rows>(); })), coordinator(of) {
    coordinator.define("train", [this](const Tensors& arguments) {
      strategy.run(
          [&](ReplicaContext& replica, const std::shared_ptr<Rows>& own) {
            const auto out = own->linear(own->rows(arguments.at(0)));
            optimizer.minimize(replica, (out - 1).square().sum(), 4);
            return 0;
          },
          net);
      return Tensors();
    });
    coordinator.define("nothing", [](const Tensors&) { return Tensors(); });
  }

  void train(std::int64_t end) {
    for (; step < end; ++step) {
      coordinator.schedule("train", {at::arange(step % 7, step % 7 + 4)});
      coordinator.schedule("nothing");
    }
    coordinator.join();
  }

  // The kernel, and all rows.
  Tensor values() {
    coordinator.pull_variables();
    const at::NoGradGuard no_grad;
    return at::cat({net[0]->linear->weight, net[0]->rows(at::arange(100))});
  }

  ParameterServerStrategy strategy;
  Mirrored<std::shared_ptr<Rows>> net;
  ReplicatedOptimizer optimizer =
      strategy.optimizer(Adam({.learning_rate = ExponentialDecay(0.1, {.decay_steps = 3, .decay_rate = 0.9})}), net);
  ClusterCoordinator coordinator;
  std::int64_t step = 0;
  Checkpoint checkpoint{{{"net", net.trackable()}, {"optimizer", optimizer.trackable()}, {"step", track(step)}}};
};

TEST(ClusterCoordinator, ALoopGoesOnFromItsCheckpointWithOtherServers) {
  const auto path = (fresh_folder("cluster_coordinator", "loop") / "ckpt").string();
  Tensor expected;
  const auto run = [&](const ServerJob& job, const std::function<void(RowsLoop&)>& program) {
    expect_no_error(run_job(job, [&](const auto& strategy) {
      RowsLoop loop(strategy);
      loop.coordinator.run([&] { program(loop); });
    }));
  };
  run({.workers = 1, .servers = 2}, [&](RowsLoop& loop) {
    loop.train(10);
    loop.checkpoint.write(path);
    EXPECT_EQ(loop.optimizer.iterations(), 10);
    loop.train(20);
    expected = loop.values();
    loop.checkpoint.restore(path);  // back in the same job
    EXPECT_EQ(loop.step, 10);
    loop.train(20);
    EXPECT_TRUE(at::equal(loop.values(), expected));
  });
  for (const int copies : {1, 2}) {
    run({.workers = 1, .servers = 3, .options = {.replicas_of_shards = copies}}, [&](RowsLoop& loop) {
      loop.checkpoint.restore(path);
      EXPECT_EQ(loop.step, 10);
      loop.train(20);
      EXPECT_TRUE(at::equal(loop.values(), expected)) << loop.values() << expected;
      loop.coordinator.schedule("nothing");
      const auto message = message_of<InvalidArgument>([&] {
        for (int i = 0; i < 100; ++i) loop.coordinator.schedule("nothing");
        loop.checkpoint.write(path);
      });
      expect_says(message, "scheduled steps have not finished; call ClusterCoordinator::join");
    });
  }
}

// One device restores what was saved with servers; the other way round is refused.
TEST(ClusterCoordinator, ACheckpointOfALoopIsRestoredWithoutServers) {
  const auto folder = fresh_folder("cluster_coordinator", "without servers");
  const auto optimizer_of = [](const Strategy& strategy, auto& net) {
    return strategy.optimizer(SGD({.learning_rate = 0.1, .momentum = 0.9}), net);
  };
  const auto make_net = [](const Strategy& strategy) {
    return strategy.replicate([] {
      torch::nn::Linear made(torch::nn::LinearOptions(2, 1));
      made->to(torch::kDouble);
      const at::NoGradGuard no_grad;
      made->weight.fill_(0.5);
      made->bias.zero_();
      return made;
    });
  };
  const auto step = [](const Strategy& strategy, auto& net, const ReplicatedOptimizer& optimizer, double x) {
    strategy.run(
        [&](ReplicaContext& replica, torch::nn::Linear& own) {
          optimizer.minimize(replica, (own(number(x).expand({1, 2})) - 1).square().sum(), 1);
          return 0;
        },
        net);
  };
  const auto train_alone = [&](bool restored) {
    const OneDeviceStrategy strategy("cpu:0");
    auto net = make_net(strategy);
    const auto optimizer = optimizer_of(strategy, net);
    Checkpoint checkpoint({{"net", net.trackable()}, {"optimizer", optimizer.trackable()}});
    if (restored) {
      checkpoint.restore((folder / "servers").string());
      EXPECT_EQ(optimizer.iterations(), 5);
    }
    for (int i = restored ? 5 : 0; i < 10; ++i) step(strategy, net, optimizer, i);
    checkpoint.write((folder / "alone").string());
    return at::cat({net[0]->weight.flatten(), net[0]->bias});
  };
  const auto expected = train_alone(false);
  expect_no_error(run_job({.workers = 1, .servers = 2}, [&](const auto& strategy) {
    auto net = make_net(strategy);
    const auto optimizer = optimizer_of(strategy, net);
    Checkpoint checkpoint({{"net", net.trackable()}, {"optimizer", optimizer.trackable()}});
    if (!strategy.is_chief()) {
      expect_says(message_of<InvalidArgument>([&] { checkpoint.write((folder / "servers").string()); }),
                  "the chief alone saves");
    }
    ClusterCoordinator coordinator(strategy);
    coordinator.define("train", [&](const Tensors& arguments) {
      step(strategy, net, optimizer, arguments.at(0).item<double>());
      return Tensors();
    });
    coordinator.run([&] {
      expect_says(message_of<InvalidArgument>([&] { checkpoint.restore((folder / "alone").string()); }),
                  "was saved without parameter servers, so they cannot restore \"optimizer\"");
      for (int i = 0; i < 5; ++i) coordinator.schedule("train", {number(i)}).fetch();
      checkpoint.write((folder / "servers").string());
    });
  }));
  EXPECT_LE((train_alone(true) - expected).abs().max().item<double>(), 1e-12);
}

TEST(ClusterCoordinator, AnUpdateOutsideOfAStepAndASynchronousStrategyAreNamed) {
  const auto errors = run_job({.workers = 1}, [&](const auto& strategy) {
    Counter counter(strategy);
    if (strategy.task_type() != "ps") counter.add({number(1)});
  });
  EXPECT_EQ(errors.size(), 2U);
  for (const auto& error : errors) expect_says(error, "outside of a step that the chief gave out");
  const auto synchronous = run_job({.options = {.synchronous = true}},
                                   [&](const auto& strategy) { ClusterCoordinator coordinator(strategy); });
  EXPECT_EQ(synchronous.size(), 4U);
  for (const auto& error : synchronous) expect_says(error, "can be neither synchronous");
}

}  // namespace
}  // namespace lockstep
