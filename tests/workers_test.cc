// Tests MultiWorkerMirroredStrategy's promises: the weights of one process on the same batches, equal copies
// everywhere, logs and checkpoints once, and nobody left waiting.
#include "tests/workers.h"
#include "base/fresh_folder_testing.h"
#include "base/text.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <filesystem>
#include <fstream>

namespace lockstep {
namespace {

// Returns the weights that a training ends with.
using Train = std::function<std::vector<Tensor>(const Strategy&)>;

struct Shape {
  int workers, replicas;
};

class Workers : public testing::TestWithParam<Shape> {
 protected:
  WorkerOptions options() const { return {.workers = GetParam().workers, .replicas = GetParam().replicas}; }

  // Expects of `train` on all workers equal results everywhere, within `tolerance` of `expected`.
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
      model.fit(data, {.verbose = 0, .steps_per_epoch = steps});
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
  for (const auto dtype : {DType::bfloat16, DType::float16, DType::int8}) {
    apart.communication.gradient_dtype = dtype;
    compare(SGD({.learning_rate = 0.05}), at::kFloat, 20, true, dtype == DType::float16 ? 1e-3 : 1e-2, apart);
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
        {.optimizer = SGD({.learning_rate = 0.1}), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
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
        {.optimizer = Adam({.learning_rate = 0.01}), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
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

// Float layers, whose gradients are written to the buckets at once: used once, used twice, used otherwise as well.
struct FloatsImpl : torch::nn::Module {
  FloatsImpl() {
    once = register_module("once", torch::nn::Linear(6, 16));
    twice = register_module("twice", torch::nn::Linear(16, 16));
    also = register_module("also", torch::nn::Linear(16, 16));
    last = register_module("last", torch::nn::Linear(16, 3));
  }
  Tensor forward(const Tensor& x) {
    auto h = torch::tanh(twice(torch::tanh(twice(torch::tanh(once(x))))));
    h = torch::tanh(torch::matmul(also(h), also->weight));
    return last(h);
  }
  torch::nn::Linear once = nullptr, twice = nullptr, also = nullptr, last = nullptr;
};

TEST_P(Workers, FloatLayersHaveTheGradientsOfOneProcess) {
  const auto data = make_data(at::kFloat).batch(26).repeat();  // every replica has some rows
  const std::string initial = testing::TempDir() + "/workers_floats";
  const auto train = [&](const Strategy& strategy, bool first) {
    const auto scope = strategy.scope();
    Model model([] { return std::make_shared<FloatsImpl>(); });
    model.compile(
        {.optimizer = SGD({.learning_rate = 0.05}), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
    if (first) model.save_weights(initial);
    model.load_weights(initial);
    model.fit(data, {.verbose = 0, .steps_per_epoch = 20});
    return weights_of(model);
  };
  const auto expected = train(OneDeviceStrategy(), true);
  auto apart = options();
  apart.hosts_differ = true;
  auto sharded = options();
  sharded.shard_optimizer_state = true;
  for (const auto& with : {options(), apart, sharded}) {
    expect_near([&](const Strategy& strategy) { return train(strategy, false); }, expected, 1e-5, with);
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
                                          .verbose = 0,
                                          .callbacks = {CSVLogger(own + "/log.csv", {.append = true}),
                                                        BackupAndRestore(own, {.delete_checkpoint = false}),
                                                        ModelCheckpoint(own + "/ckpt_{epoch}")}});
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

TEST_P(Workers, ACustomLoopsCheckpointsAreTheChiefs) {
  const auto folder = fresh_folder("workers", text("loop_", GetParam().workers, "_", GetParam().replicas)).string();
  const auto errors = run_workers(options(), [&](const MultiWorkerMirroredStrategy& strategy) {
    const auto scope = strategy.scope();
    const Variable total(at::full({2}, 1.0), {.aggregation = VariableAggregation::only_first_replica});
    std::int64_t steps = strategy.worker_rank();
    Checkpoint checkpoint({{"total", total.trackable()}, {"steps", track(steps)}});
    // Other workers may have other disks.
    CheckpointManager manager(checkpoint, strategy.is_chief() ? folder : "/proc/nowhere", {.max_to_keep = 2});
    EXPECT_FALSE(manager.restore_or_initialize());
    for (int i = 0; i < 3; ++i) manager.save();
    total.assign(at::full({2}, 7.0));
    steps = 100;
    EXPECT_TRUE(manager.restore_or_initialize());
    EXPECT_EQ(total.read()[0].item<double>(), 1);
    EXPECT_EQ(steps, 0);  // the chief's
    EXPECT_EQ(manager.latest(), folder + "/ckpt-3");
    EXPECT_THROW(checkpoint.restore(folder + "/none"), Error);
    EXPECT_THROW(checkpoint.write("/proc/nowhere/ckpt"), Error);
    checkpoint.save(folder + "/other");
  });
  expect_no_errors(errors);
  EXPECT_FALSE(std::filesystem::exists(folder + "/ckpt-1.safetensors"));
  EXPECT_TRUE(std::filesystem::exists(folder + "/ckpt-3.safetensors"));
}

INSTANTIATE_TEST_SUITE_P(Shapes, Workers, testing::Values(Shape{2, 1}, Shape{2, 2}, Shape{3, 1}, Shape{3, 2}),
                         [](const auto& shape) {
                           return std::to_string(shape.param.workers) + "_workers_of_" +
                                  std::to_string(shape.param.replicas);
                         });

}  // namespace
}  // namespace lockstep
