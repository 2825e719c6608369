// What ClusterCoordinator promises, with the processes of the job as threads that call each other over loopback.
#include "lockstep/strategy/cluster_coordinator.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include <atomic>
#include <set>

#include "base/expect_says_testing.h"
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
          coordinator.pull_variables();
          EXPECT_EQ(counter.value(), run * 5050.0);
        });
      }
    }));
  }
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
