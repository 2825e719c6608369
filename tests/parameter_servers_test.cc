// What ParameterServerStrategy promises, with the processes of the job as threads that call each other over loopback.
#include <ATen/ATen.h>

#include <atomic>

#include "base/expect_says_testing.h"
#include "base/text.h"
#include "tests/workers.h"

namespace lockstep {
namespace {

struct ServerJob {
  int workers = 2, servers = 1;
  ParameterServerOptions options = {};
};

// Runs body(strategy) in each process at once; an element is "ps 0: what it threw".
std::vector<std::string> run_job(const ServerJob& job,
                                 const std::function<void(const ParameterServerStrategy&)>& body) {
  const auto store = Store::hold("127.0.0.1:0");
  std::mutex mutex;
  std::vector<std::string> errors;
  std::vector<std::jthread> threads;
  const std::map<std::string, int> tasks{{"chief", 1}, {"worker", job.workers}, {"ps", job.servers}};
  int rank = 0;
  for (const char* const type : {"chief", "worker", "ps"}) {
    for (int index = 0; index < tasks.at(type); ++index, ++rank) {
      threads.emplace_back([&, type, index, rank] {
        auto options = job.options;
        if (options.devices.empty()) options.devices = {"cpu:0"};
        options.threads_per_replica = 1;
        options.timeout_seconds = 60;
        options.start_timeout_seconds = 30;
        options.cluster = Cluster{.world = {.rank = rank,
                                            .size = 1 + job.workers + job.servers,
                                            .host = text("host ", rank)},  // so that none is pinned
                                  .store = store.address(),
                                  .source = "a test",
                                  .task_type = type,
                                  .task_index = index,
                                  .tasks = tasks};
        try {
          body(ParameterServerStrategy(options));
        } catch (const std::exception& error) {
          const std::lock_guard lock(mutex);
          errors.push_back(text(type, " ", index, ": ", error.what()));
        }
      });
    }
  }
  threads.clear();
  return errors;
}

void expect_no_error(const std::vector<std::string>& errors) { EXPECT_EQ(join(errors, "\n"), ""); }

// The same weights to begin with, for all that train.
std::string initial_weights(at::ScalarType dtype) {
  const auto path = testing::TempDir() + text("/parameter_servers_initial_", dtype);
  make_model(dtype, SGD()).save_weights(path);
  return path;
}

TEST(ParameterServers, SynchronousFitGivesTheWeightsOfMirrored) {
  const auto compare = [&](const Optimizer& optimizer, at::ScalarType dtype, int steps, double tolerance,
                           ServerJob job) {
    const auto initial = initial_weights(dtype);
    const auto data = make_data(dtype, true).shuffle(26, {.seed = 3}).batch(7).repeat();
    const auto train = [&](const Strategy& strategy) {
      const auto scope = strategy.scope();
      auto model = make_model(dtype, optimizer);
      model.load_weights(initial);
      const auto history = model.fit(data, {.epochs = 2, .verbose = 0, .steps_per_epoch = steps / 2});
      return std::pair(weights_of(model), history);
    };
    const auto [expected, expected_history] = train(MirroredStrategy(2));
    job.options.synchronous = true;
    expect_no_error(run_job(job, [&](const auto& strategy) {
      const auto [weights, history] = train(strategy);
      EXPECT_LE(largest_difference(weights, expected), tolerance) << strategy.task_type();
      ASSERT_EQ(history.epoch, expected_history.epoch) << strategy.task_type();
      for (const auto& [name, values] : expected_history.history) {
        for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(history[name][i], values[i], tolerance) << name;
      }
    }));
  };
  const auto momentum = SGD({.learning_rate = 0.05, .momentum = 0.9});
  const auto adam = Adam({.learning_rate = 0.01, .epsilon = 1e-2});
  compare(momentum, at::kDouble, 50, 1e-9, {});
  compare(adam, at::kDouble, 50, 1e-9, {.servers = 2, .options = {.variable_partitioner = FixedShardsPartitioner(2)}});
  compare(adam, at::kDouble, 50, 1e-9, {.workers = 3});
  compare(adam, at::kDouble, 50, 1e-9, {.options = {.devices = {"cpu:0", "cpu:1"}}});
  compare(adam, at::kFloat, 20, 1e-5, {});
}

// Steps are numbered, so the sum of what they add is known whatever their order.
TEST(ParameterServers, AsynchronousFitAppliesEachStepOnce) {
  // The gradient of each batch's loss with respect to the bias is -x, so SGD adds up the rates times the x.
  const auto x = torch::arange(1, 41, torch::kDouble).view({40, 1});
  const auto data = Dataset::from_tensor_slices(x, torch::zeros({40, 1}, torch::kDouble)).batch(1);
  for (const int workers : {1, 3}) {
    expect_no_error(run_job({.workers = workers}, [&](const auto& strategy) {
      const auto scope = strategy.scope();
      Sequential model({Dense(1, {.kernel_initializer = "zeros"})});
      const auto loss = [](const Tensor&, const Tensor& out) { return -out; };
      model.compile({.optimizer = SGD({.learning_rate = 1}), .loss = Loss("minus", loss)});
      std::int64_t batches = 0;
      const auto count = LambdaCallback({.on_train_batch_end = [&](std::int64_t, const Logs&) { ++batches; }});
      model.fit(data, {.epochs = 3, .verbose = 0, .callbacks = {count}});
      EXPECT_EQ(batches, strategy.is_chief() ? 120 : 0);
      const auto weights = weights_of(model);
      EXPECT_EQ(weights[0].template item<double>(), 3 * 820.0);  // the kernel: each x once an epoch
      EXPECT_EQ(weights[1].template item<double>(), 120.0);      // the bias
      EXPECT_EQ(model.iterations(), strategy.is_chief() ? 120 : model.iterations());
    }));
  }
}

}  // namespace
}  // namespace lockstep
