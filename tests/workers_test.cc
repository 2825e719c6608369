// What MultiWorkerMirroredStrategy promises: the weights of one process on the same batches, equal copies everywhere,
// logs and checkpoints once, and nobody left waiting.
#include "tests/workers.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <filesystem>
#include <fstream>
#include <mutex>

#include "gradient/replicated_parameters.h"

namespace lockstep {
namespace {

// 26 examples in batches of 7: the last has 5, so that of 6 replicas one is idle.
Dataset make_data(at::ScalarType dtype, bool weighted = false) {
  torch::manual_seed(4);
  const auto x = torch::randn({26, 6}, dtype);
  const auto y = torch::randint(3, {26}, torch::kLong);
  return Dataset::from_tensor_slices(x, y, weighted ? torch::rand({26}, dtype) : Tensor());
}

Sequential make_model(at::ScalarType dtype, const Optimizer& optimizer) {
  Sequential model({Dense(9, {.activation = "tanh"}), Dense(3)});
  model.compile(
      {.loss = SparseCategoricalCrossentropy({.from_logits = true}), .optimizer = optimizer, .metrics = {"accuracy"}});
  model.build({6}, dtype);
  return model;
}

std::vector<Tensor> weights_of(const Model& model, int replica = 0) {
  std::vector<Tensor> weights;
  const auto& parameters = *model.module().parameters();
  for (std::size_t i = 0; i < parameters.slots().size(); ++i)
    weights.push_back(parameters.parameter(replica, i).detach().clone());
  return weights;
}

double largest_difference(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, (a[i] - b[i]).abs().max().item<double>());
  return largest;
}

bool equal_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!torch::equal(a[i], b[i])) return false;
  }
  return a.size() == b.size();
}

// What each worker has, collected by rank.
template <class T>
class Collected {
 public:
  void add(const MultiWorkerMirroredStrategy& strategy, T value) {
    const std::lock_guard lock(mutex_);
    values_[strategy.worker_rank()] = std::move(value);
  }
  const std::map<int, T>& values() const { return values_; }
  const T& chiefs() const { return values_.at(0); }

 private:
  std::mutex mutex_;
  std::map<int, T> values_;
};

// Returns the weights that a training ends with.
using Train = std::function<std::vector<Tensor>(const Strategy&)>;

struct Shape {
  int workers, replicas;
};

class Workers : public testing::TestWithParam<Shape> {
 protected:
  WorkerOptions options() const { return {.workers = GetParam().workers, .replicas = GetParam().replicas}; }

  // `train` on all workers: equal everywhere, and as far from `expected` as allowed.
  void expect_near(const Train& train, const std::vector<Tensor>& expected, double tolerance, WorkerOptions with) {
    Collected<std::vector<Tensor>> weights;
    expect_no_errors(run_workers(with, [&](const auto& strategy) { weights.add(strategy, train(strategy)); }));
    ASSERT_EQ(weights.values().size(), static_cast<std::size_t>(with.workers));
    for (const auto& [rank, own] : weights.values()) EXPECT_TRUE(equal_bits(own, weights.chiefs())) << rank;
    EXPECT_LE(largest_difference(weights.chiefs(), expected), tolerance);
  }
};

TEST_P(Workers, FitGivesTheWeightsOfOneProcess) {
  const std::string initial = testing::TempDir() + "/workers_initial";
  const auto compare = [&](const Optimizer& optimizer, at::ScalarType dtype, int steps, bool weighted, double tolerance,
                           WorkerOptions with) {
    const auto data = make_data(dtype, weighted).shuffle(26, {.seed = 3}).batch(7).repeat();
    const Train train = [&](const Strategy& strategy) {
      const auto scope = strategy.scope();
      auto model = make_model(dtype, optimizer);
      if (strategy.num_replicas_in_sync() == 1) model.save_weights(initial);
      model.load_weights(initial);
      model.fit(data, {.steps_per_epoch = steps, .verbose = 0});
      EXPECT_EQ(model.iterations(), steps);
      for (int r = 1; r < strategy.num_local_replicas(); ++r)
        EXPECT_TRUE(equal_bits(weights_of(model, r), weights_of(model)));
      return weights_of(model);
    };
    const auto one = train(OneDeviceStrategy());
    expect_near(train, one, tolerance, with);
  };
  const auto adam = Adam({.learning_rate = 0.01, .epsilon = 1e-2});
  const auto clipped = Adam({.learning_rate = 0.01, .epsilon = 1e-2, .global_clipnorm = 0.1});
  compare(SGD({.learning_rate = 0.05, .momentum = 0.9}), at::kDouble, 50, true, 1e-9, options());
  compare(adam, at::kDouble, 50, false, 1e-9, options());
  compare(clipped, at::kDouble, 50, true, 1e-9, options());
  compare(adam, at::kFloat, 20, true, 1e-5, options());

  // Over a network gradients are sent while backward goes on; here in a bucket a layer.
  auto apart = options();
  apart.hosts_differ = true;
  apart.communication.bucket_cap_mb = apart.communication.first_bucket_mb = 1e-4;
  compare(adam, at::kDouble, 50, true, 1e-9, apart);
  compare(clipped, at::kDouble, 50, false, 1e-9, apart);
  for (const auto dtype : {DType::bfloat16, DType::float16}) {
    apart.communication.gradient_dtype = dtype;
    compare(SGD({.learning_rate = 0.05}), at::kFloat, 20, true, dtype == DType::bfloat16 ? 1e-2 : 1e-3, apart);
    compare(SGD({.learning_rate = 0.05}), at::kDouble, 20, true, 1e-9, apart);  // sent as they are
  }
}

// Dropout draws from (seed, step, replica), wherever the replica is.
TEST_P(Workers, DropoutIsThatOfAsManyReplicasInOneProcess) {
  const auto data = make_data(at::kDouble).batch(7);
  const std::string initial = testing::TempDir() + "/workers_dropout";
  const auto train = [&](const Strategy& strategy, bool first) {
    const auto scope = strategy.scope();
    Sequential model({Dense(16, {.activation = "relu"}), Dropout(0.5), Dense(3)});
    model.compile(
        {.loss = SparseCategoricalCrossentropy({.from_logits = true}), .optimizer = SGD({.learning_rate = 0.1})});
    model.build({6}, at::kDouble);
    if (first) model.save_checkpoint(initial);
    model.load_checkpoint(initial);
    model.fit(data, {.epochs = 3, .verbose = 0});
    return weights_of(model);
  };
  const auto expected = train(MirroredStrategy(GetParam().workers * GetParam().replicas), true);
  expect_near([&](const Strategy& strategy) { return train(strategy, false); }, expected, 1e-9, options());
}

struct KindsImpl : torch::nn::Module {
  KindsImpl() {
    shared = register_module("shared", torch::nn::Linear(6, 6));
    frozen = register_module("frozen", torch::nn::Linear(6, 6));
    for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
    rarely = register_module("rarely", torch::nn::Linear(6, 6));
    never = register_module("never", torch::nn::Linear(6, 6));
    last = register_module("last", torch::nn::Linear(6, 3));
    register_parameter("tied", shared->weight);
    to(at::kDouble);
  }
  Tensor forward(const Tensor& x) {
    auto h = torch::tanh(shared(torch::tanh(shared(x))));
    h = frozen(torch::matmul(h, shared->weight.t()));
    const auto large = (x.select(1, 0) > 1.5).any().item<bool>();  // in some parts of some batches only
    return last(large ? h + rarely(h) : h);
  }
  torch::nn::Linear shared = nullptr, frozen = nullptr, rarely = nullptr, never = nullptr, last = nullptr;
};

TEST_P(Workers, ParametersOfEveryKindAreThoseOfAsManyReplicasInOneProcess) {
  const auto data = make_data(at::kDouble).batch(7);
  const std::string initial = testing::TempDir() + "/workers_kinds";
  const auto train = [&](const Strategy& strategy, bool first) {
    const auto scope = strategy.scope();
    Model model([] { return std::make_shared<KindsImpl>(); });
    model.compile(
        {.loss = SparseCategoricalCrossentropy({.from_logits = true}), .optimizer = Adam({.learning_rate = 0.01})});
    if (first) model.save_checkpoint(initial);
    model.load_checkpoint(initial);
    model.fit(data, {.epochs = 5, .verbose = 0});
    return weights_of(model);
  };
  const auto expected = train(MirroredStrategy(GetParam().workers * GetParam().replicas), true);
  auto apart = options();
  apart.hosts_differ = true;
  for (const auto& with : {options(), apart}) {
    expect_near([&](const Strategy& strategy) { return train(strategy, false); }, expected, 1e-9, with);
  }
}

TEST_P(Workers, EvaluateAndPredictSeeEveryExampleOnceAndInOrder) {
  const auto data = make_data(at::kDouble, true).batch(7);
  const std::string initial = testing::TempDir() + "/workers_evaluate";
  const auto results = [&](const Strategy& strategy, bool first) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, SGD());
    if (first) model.save_weights(initial);
    model.load_weights(initial);
    const auto logs = model.evaluate(data);
    return std::vector<Tensor>{at::tensor({logs["loss"], logs["accuracy"]}, at::kDouble), model.predict(data)};
  };
  const auto expected = results(OneDeviceStrategy(), true);
  expect_near([&](const Strategy& strategy) { return results(strategy, false); }, expected, 1e-12, options());
}

TEST_P(Workers, ACustomLoopMeetsAllReplicas) {
  const int all = GetParam().workers * GetParam().replicas;
  const auto errors = run_workers(options(), [&](const MultiWorkerMirroredStrategy& strategy) {
    EXPECT_EQ(strategy.num_replicas_in_sync(), all);
    const auto ids = strategy.run([](ReplicaContext& replica) {
      const auto own = at::full({1, 2}, replica.replica_id(), at::kFloat);
      const auto everybody = replica.all_gather(own);
      EXPECT_EQ(everybody.size(0), replica.num_replicas_in_sync());
      EXPECT_EQ(everybody[replica.replica_id()][0].item<float>(), replica.replica_id());
      return replica.all_reduce(ReduceOp::sum, own)[0][0].item<double>();
    });
    const double sum = all * (all - 1) / 2.0;
    for (const double value : ids) EXPECT_EQ(value, sum);
    EXPECT_EQ(strategy.reduce(ReduceOp::sum, ids), sum * all);
    EXPECT_EQ(strategy.reduce(ReduceOp::mean, ids), sum);
    const auto mine = strategy.run([](ReplicaContext& replica) { return at::full({1}, replica.replica_id()); });
    EXPECT_TRUE(at::equal(strategy.gather(mine), at::arange(all).to(mine[0].scalar_type())));
  });
  expect_no_errors(errors);
}

TEST_P(Workers, VariablesAreOneOverAllReplicas) {
  const int all = GetParam().workers * GetParam().replicas;
  const auto errors = run_workers(options(), [&](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    const Variable total(
        at::full({}, strategy.worker_rank() + 5.0),  // the chief's is everybody's
        {.synchronization = VariableSynchronization::on_read, .aggregation = VariableAggregation::sum});
    strategy.run([&](ReplicaContext& replica) { total.assign_add(replica, at::full({}, 1.0)); });
    EXPECT_EQ(total.read().item<double>(), 5.0 + all);
  });
  expect_no_errors(errors);
}

TEST_P(Workers, LogsAndCheckpointsAreWrittenOnceAndRestoreAll) {
  const std::string folder = testing::TempDir() + "/workers_once_" + std::to_string(GetParam().workers) + "_" +
                             std::to_string(GetParam().replicas);
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const auto data = make_data(at::kDouble).shuffle(26, {.seed = 3}).batch(7);
  const std::string initial = testing::TempDir() + "/workers_start";
  make_model(at::kDouble, SGD()).save_weights(initial);
  const auto fit = [&](const Strategy& strategy, int epochs) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, Adam({.learning_rate = 0.01}));
    model.load_weights(initial);
    // Other workers may have other disks: what they are told of paths does not matter.
    const std::string own = strategy.is_chief() ? folder : "/proc/nowhere";
    const auto history = model.fit(data, {.epochs = epochs,
                                          .callbacks = {CSVLogger(own + "/log.csv", {.append = true}),
                                                        BackupAndRestore(own, {.delete_checkpoint = false}),
                                                        ModelCheckpoint(own + "/ckpt_{epoch}")},
                                          .verbose = 0});
    EXPECT_EQ(history.epoch.size(), static_cast<std::size_t>(epochs));
    auto weights = weights_of(model);
    weights.push_back(at::tensor(history["loss"], at::kDouble));
    return weights;
  };
  Collected<std::vector<Tensor>> whole, halves;
  expect_no_errors(run_workers(options(), [&](const auto& strategy) { whole.add(strategy, fit(strategy, 4)); }));
  std::ifstream log(folder + "/log.csv");
  EXPECT_EQ(std::count(std::istreambuf_iterator<char>(log), {}, '\n'), 5);
  EXPECT_TRUE(std::filesystem::exists(folder + "/ckpt_4.safetensors"));

  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  expect_no_errors(run_workers(options(), [&](const auto& strategy) { fit(strategy, 2); }));
  expect_no_errors(run_workers(options(), [&](const auto& strategy) { halves.add(strategy, fit(strategy, 4)); }));
  for (const auto& [rank, own] : halves.values()) EXPECT_TRUE(equal_bits(own, whole.chiefs())) << rank;
}

INSTANTIATE_TEST_SUITE_P(Shapes, Workers, testing::Values(Shape{2, 1}, Shape{2, 2}, Shape{3, 1}, Shape{3, 2}),
                         [](const auto& shape) {
                           return std::to_string(shape.param.workers) + "_workers_of_" +
                                  std::to_string(shape.param.replicas);
                         });

// --- what goes wrong is said on all workers

void expect_all_say(const std::vector<std::string>& errors, const std::string& part) {
  for (std::size_t rank = 0; rank < errors.size(); ++rank)
    EXPECT_NE(errors[rank].find(part), std::string::npos) << "worker " << rank << " says: " << errors[rank];
}

TEST(WorkersDiffer, InTheirModels) {
  const auto errors = run_workers({.workers = 3}, [](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    Sequential model({Dense(strategy.worker_rank() == 2 ? 4 : 3)});
    model.build({6});
  });
  expect_all_say(
      errors,
      "the workers' models differ: worker 0 has dense.weight Float [3, 6], worker 2 has dense.weight Float [4, 6]");
}

TEST(WorkersDiffer, InTheirDataAndBatchSizes) {
  const auto fit = [](const std::function<Dataset(int worker)>& data) {
    return run_workers({}, [&](const MultiWorkerMirroredStrategy& strategy) {
      const auto scope = strategy.scope();
      auto model = make_model(at::kDouble, SGD());
      model.fit(data(strategy.worker_rank()), {.verbose = 0});
    });
  };
  const auto all = make_data(at::kDouble);
  expect_all_say(fit([&](int worker) { return all.batch(worker == 1 ? 8 : 7).take(3); }),
                 "first batch x [7, 6], worker 1 has first batch x [8, 6]");
  expect_all_say(fit([&](int worker) { return all.batch(7).take(worker == 1 ? 2 : 3); }),
                 "batches in the data set 3, worker 1 has batches in the data set 2");
  expect_all_say(fit([&](int worker) { return all.shuffle(26, {.seed = worker == 1 ? 1U : 2U}).batch(7); }),
                 "first batch's contents (hash)");
}

TEST(WorkersDiffer, InTheirNumbersOfReplicas) {
  const auto store = Store::hold("127.0.0.1:0");
  std::vector<std::string> errors(2);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        MultiWorkerMirroredStrategy(
            {.devices = rank == 0 ? std::vector<std::string>{"cpu:0"} : std::vector<std::string>{"cpu:0", "cpu:1"},
             .cluster = Cluster{.world = {.rank = rank, .size = 2}, .store = store.address()},
             .start_timeout_seconds = 20});
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  threads.clear();
  expect_all_say(errors, "the workers' numbers of replicas differ: worker 0 has 1, worker 1 has 2");
}

TEST(WorkersFail, OneThatThrowsIsHeardByAll) {
  const auto data = make_data(at::kDouble).batch(7);
  const auto errors = run_workers({.workers = 3}, [&](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, SGD());
    LambdaCallback::Functions functions;
    functions.on_train_batch_end = [&](std::int64_t batch, const Logs&) {
      if (batch == 2 && strategy.worker_rank() == 1) throw IoError("my disk is full");
    };
    model.fit(data, {.callbacks = {LambdaCallback(functions)}, .verbose = 0});
  });
  expect_all_say(errors, "my disk is full");
  EXPECT_NE(errors[0].find("worker 1"), std::string::npos) << errors[0];
}

TEST(WorkersFail, AReplicaThatThrowsInAStepIsHeardByAll) {
  const auto errors = run_workers({.workers = 2, .replicas = 2}, [](const MultiWorkerMirroredStrategy& strategy) {
    strategy.run([](ReplicaContext& replica) {
      if (replica.replica_id() == 3) throw std::out_of_range("no such thing");
      replica.all_reduce(ReduceOp::sum, at::ones({2}));
    });
  });
  expect_all_say(errors, "no such thing");
}

TEST(WorkersFail, DataThatCannotBeReadOnOneIsHeardByAll) {
  const auto errors = run_workers({.workers = 3}, [&](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, SGD());
    const auto data = Dataset::from_generator([&]() -> Dataset::Generator {
      return [&, given = 0]() mutable -> std::optional<Example> {
        if (strategy.worker_rank() == 2 && given == 20) throw IoError("no such file");
        return ++given > 40 ? std::nullopt
                            : std::optional(Example{at::ones({6}, at::kDouble), at::ones({}, at::kLong)});
      };
    });
    model.fit(data.batch(4), {.verbose = 0});
  });
  expect_all_say(errors, "no such file");
}

TEST(WorkersFail, AMissingCheckpointIsHeardByAll) {
  const auto errors = run_workers({}, [](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, SGD());
    model.load_weights("/proc/nowhere/weights");
  });
  expect_all_say(errors, "/proc/nowhere/weights.safetensors");
}

// One worker may want to stop where the others would go on.
TEST(WorkersAgree, OnTheStepAfterWhichTheyStop) {
  Collected<std::int64_t> steps;
  const auto data = make_data(at::kDouble).batch(2);
  expect_no_errors(run_workers({.workers = 3}, [&](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, SGD());
    LambdaCallback::Functions functions;
    functions.on_train_batch_end = [&](std::int64_t batch, const Logs&) {
      if (batch == 1 && strategy.worker_rank() == 2) model.stop_training();
    };
    model.fit(data, {.epochs = 2, .callbacks = {LambdaCallback(functions)}, .verbose = 0});
    steps.add(strategy, model.iterations());
  }));
  for (const auto& [rank, count] : steps.values()) EXPECT_EQ(count, 3) << rank;
}

}  // namespace
}  // namespace lockstep
