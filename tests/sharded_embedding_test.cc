// ShardedEmbedding with the processes of a job as threads that call each other over loopback.
#include <torch/nn/modules/embedding.h>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "parameter_server/table.h"
#include "tests/server_job.h"

namespace lockstep {
namespace {

constexpr std::int64_t kRows = 40, kWidth = 3;

ShardedEmbedding sharded(RowInitializer initializer = "normal") {
  return {kRows, kWidth, {.embeddings_initializer = initializer, .dtype = DType::float64, .seed = 7}};
}

// A table of LibTorch's with the same first values.
torch::nn::Embedding dense() {
  torch::nn::Embedding embedding(kRows, kWidth);
  embedding->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  const parameter_server::TableSpec table{.dtype = DType::float64, .width = kWidth, .initializer = "normal", .seed = 7};
  for (std::int64_t id = 0; id < kRows; ++id) {
    write_initial_values(table, id, reinterpret_cast<std::byte*>(embedding->weight[id].data_ptr<double>()));
  }
  return embedding;
}

// Two users of one table, which also have ids in common.
template <class Lookup>
Tensor score(const Lookup& lookup, const Tensor& ids) {
  return (lookup(ids).select(1, 0) * lookup(ids.narrow(1, 1, 2)).sum(1)).sum(1, /*keepdim=*/true);
}
struct ShardedScore : torch::nn::Module {
  ShardedScore() { register_module("rows", embedding.ptr()); }
  Tensor forward(const Tensor& ids) { return score(embedding, ids); }
  ShardedEmbedding embedding = sharded();
};
struct DenseScore : torch::nn::Module {
  DenseScore() { register_module("rows", embedding); }
  Tensor forward(const Tensor& ids) {
    return score([&](const Tensor& x) { return embedding(x); }, ids);
  }
  torch::nn::Embedding embedding = dense();
};

// 23 examples with 4 ids each, in batches of 6: the last has 5, so that some id comes twice in most.
Dataset make_ids() {
  static const auto data = [] {
    torch::manual_seed(5);
    return Dataset::from_tensor_slices(torch::randint(kRows, {23, 4}, torch::kLong),
                                       torch::randn({23, 1}, torch::kDouble));
  }();
  return data.batch(6);
}
Dataset all_ids() {
  return Dataset::from_tensor_slices(torch::arange(kRows, torch::kLong).view({kRows / 4, 4})).batch(3);
}

// Returns the outputs of a model of `layer` and a dense one for all ids, before and after training.
Tensor train(const Strategy& strategy, const Layer& layer, const Optimizer& optimizer) {
  const auto scope = strategy.scope();
  Sequential model({layer, Flatten(), Dense(1, {.kernel_initializer = "ones"})});
  model.compile({.optimizer = optimizer, .loss = "mse"});
  const auto before = model.predict(all_ids());
  model.fit(make_ids().repeat(), {.epochs = 2, .verbose = 0, .steps_per_epoch = 25});
  return at::cat({before, model.predict(all_ids())});
}

// Rows without a gradient do not move under these optimizers, so that a table and its rows alone are the same.
TEST(ShardedEmbedding, SynchronousFitGivesTheModelOfADenseTable) {
  const auto compare = [](const Optimizer& optimizer, ServerJob job) {
    job.options.synchronous = true;
    for (const bool own_module : {false, true}) {
      const auto reference =
          own_module ? ModuleLayer([] { return std::make_shared<DenseScore>(); }) : ModuleLayer([] { return dense(); });
      const auto expected = train(MirroredStrategy(2), reference, optimizer);
      expect_no_error(run_job(job, [&](const auto& strategy) {
        const auto layer =
            own_module ? Layer(ModuleLayer([] { return std::make_shared<ShardedScore>(); })) : Layer(sharded());
        const auto out = train(strategy, layer, optimizer);
        if (!strategy.is_chief()) return;
        EXPECT_LE((out - expected).abs().max().template item<double>(), 1e-9);
      }));
    }
  };
  const auto sgd = SGD({.learning_rate = 0.02});
  const auto adagrad = Adagrad({.learning_rate = 0.05});
  compare(sgd, {});
  compare(adagrad, {.servers = 2, .options = {.replicas_of_shards = 2}});
  compare(adagrad, {.workers = 3, .servers = 3});
  compare(adagrad, {.options = {.devices = {"cpu:0", "cpu:1"}}});
}

// The gradient of every element is -1 for each of the batch's uses of its row, so rows count them.
TEST(ShardedEmbedding, AsynchronousFitAppliesEachStepOnce) {
  torch::manual_seed(6);
  const auto ids = torch::randint(kRows, {60, 5}, torch::kLong);
  const auto data = Dataset::from_tensor_slices(ids, torch::zeros({60, 1}, torch::kDouble)).batch(1);
  const auto uses = torch::bincount(ids.flatten(), {}, kRows).to(torch::kDouble);
  expect_no_error(run_job({.workers = 3, .servers = 2}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    Sequential model({sharded("zeros")});
    const auto loss = [](const Tensor&, const Tensor& out) { return -out.flatten(1).sum(1); };
    model.compile({.optimizer = SGD({.learning_rate = 1}), .loss = Loss("minus", loss)});
    model.fit(data, {.epochs = 3, .verbose = 0});
    const auto rows = model.predict(all_ids()).view({kRows, kWidth});
    if (!strategy.is_chief()) return;
    EXPECT_TRUE(torch::equal(rows, (3 * uses).unsqueeze(1).expand({kRows, kWidth}))) << rows;
  }));
}

// Width 3 in float32: the rows of the second server do not begin at a multiple of eight bytes. An embedding in eval
// mode trains too, as LibTorch's.
TEST(ShardedEmbedding, RowsOfAnyWidthAndServer) {
  struct Counts : torch::nn::Module {
    Counts() { register_module("rows", embedding.ptr()); }
    Tensor forward(const Tensor& ids) {
      embedding.ptr()->eval();
      return embedding(ids);
    }
    ShardedEmbedding embedding{kRows, kWidth, {.embeddings_initializer = "zeros", .seed = 7}};
  };
  const auto ids = torch::arange(kRows, torch::kLong).view({kRows / 5, 5});
  const auto data = Dataset::from_tensor_slices(ids, torch::zeros({kRows / 5, 1})).batch(1);
  expect_no_error(run_job({.workers = 2, .servers = 3}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    Sequential model({ModuleLayer([] { return std::make_shared<Counts>(); })});
    const auto loss = [](const Tensor&, const Tensor& out) { return -out.flatten(1).sum(1); };
    model.compile({.optimizer = SGD({.learning_rate = 1}), .loss = Loss("minus", loss)});
    model.fit(data, {.epochs = 2, .verbose = 0});
    const auto rows = model.predict(all_ids());
    if (!strategy.is_chief()) return;
    EXPECT_TRUE(torch::equal(rows, torch::full_like(rows, 2))) << rows;
  }));
}

// Momentum moves a row only in steps that have it.
TEST(ShardedEmbedding, RowsOutsideOfABatchStayAsTheyAre) {
  const auto only = [](std::int64_t id) {
    return Dataset::from_tensor_slices(torch::full({1, 1}, id, torch::kLong), torch::zeros({1, 1}, torch::kDouble))
        .batch(1);
  };
  expect_no_error(run_job({.workers = 1}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    Sequential model({sharded("zeros")});
    const auto loss = [](const Tensor&, const Tensor& out) { return -out.flatten(1).sum(1); };
    model.compile({.optimizer = SGD({.learning_rate = 1, .momentum = 0.5}), .loss = Loss("minus", loss)});
    const auto row = [&](std::int64_t id) { return model.predict(only(id))[0][0][0]; };
    for (const std::int64_t id : {4, 5, 4}) model.fit(only(id), {.verbose = 0});
    if (!strategy.is_chief()) return;
    EXPECT_EQ(row(5).template item<double>(), 1);
    EXPECT_EQ(row(4).template item<double>(), 1 + 1.5);
  }));
}

// Adam's state of a row must come back too, and its last update, by which it is evicted.
TEST(ShardedEmbedding, ATrainingGoesOnFromAFullCheckpointWithAnyServers) {
  const auto train_on = [](const auto& strategy, const std::vector<AnyCallback>& callbacks) {
    const auto scope = strategy.scope();
    const ShardedEmbedding table(
        kRows, kWidth, {.embeddings_initializer = "normal", .dtype = DType::float64, .evict_after = 12, .seed = 7});
    Sequential model({table, Flatten(), Dense(1, {.kernel_initializer = "ones"})});
    model.compile({.optimizer = Adam({.learning_rate = 0.05}), .loss = "mse"});
    model.fit(make_ids().take(3).repeat(), {.epochs = 3, .verbose = 0, .callbacks = callbacks, .steps_per_epoch = 10});
    return model.predict(all_ids());
  };
  const auto job_of = [](int workers, int servers) {
    return ServerJob{.workers = workers, .servers = servers, .options = {.synchronous = true}};
  };
  Tensor expected;
  expect_no_error(run_job(job_of(2, 1), [&](const auto& strategy) {
    const auto out = train_on(strategy, {});
    if (strategy.is_chief()) expected = out;
  }));
  for (const auto& [first, second] : {std::pair(2, 2), std::pair(1, 3), std::pair(3, 1)}) {
    const auto folder = fresh_folder("sharded_embedding", text(first, " to ", second)).string();
    const BackupAndRestore backup(folder, {.save_freq = 4});
    const auto fails = LambdaCallback({.on_train_batch_end = [epoch = 0](std::int64_t batch, const Logs&) mutable {
      epoch += batch == 9 ? 1 : 0;
      if (epoch == 1 && batch == 6) throw Error("the power went");
    }});
    run_job(job_of(2, first), [&](const auto& strategy) { EXPECT_THROW(train_on(strategy, {backup, fails}), Error); });
    expect_no_error(run_job(job_of(2, second), [&](const auto& strategy) {
      const auto out = train_on(strategy, {backup});
      if (!strategy.is_chief()) return;
      EXPECT_LE((out - expected).abs().max().template item<double>(), 1e-9) << first << " to " << second;
    }));
  }
}

TEST(ShardedEmbedding, WhatCannotBeIsNamed) {
  expect_says(message_of<InvalidArgument>([] { ShardedEmbedding(0, 3); }), "a number of rows of 0");
  expect_says(message_of<InvalidArgument>([] { ShardedEmbedding(3, 3, {.evict_after = -1}); }), "evict_after -1");
  expect_says(message_of<InvalidArgument>([] { sharded()(torch::ones({2})); }), "the ids are Float");
  const auto compile = [](Sequential& model, std::optional<std::int64_t> input = {}) {
    model.compile({.optimizer = SGD(), .loss = "mse"});
    if (input) model.build({*input}, at::kLong);
  };
  expect_says(message_of<InvalidArgument>([&] {
                const MirroredStrategy strategy(1);
                const auto scope = strategy.scope();
                Sequential model({sharded(), Flatten(), Dense(1)});
                compile(model, 4);
              }),
              "needs ParameterServerStrategy");
  const auto errors = run_job({.workers = 1}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    Sequential model({sharded(), Flatten(), Dense(1)});
    compile(model, 4);
    expect_says(message_of<InvalidArgument>([&] { compile(model); }), "compiled again");
    expect_says(message_of<InvalidArgument>([&] { model.save_weights("nowhere"); }), "save_checkpoint");
    const auto data =
        Dataset::from_tensor_slices(torch::full({6, 4}, kRows, torch::kLong), torch::ones({6, 1})).batch(2);
    model.fit(data, {.verbose = 0});
  });
  const auto shared = run_job({.workers = 1, .options = {.devices = {"cpu:0", "cpu:1"}}}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    struct Net : torch::nn::Module {
      explicit Net(const ShardedEmbedding& given) : embedding(given) { register_module("rows", embedding.ptr()); }
      Tensor forward(const Tensor& ids) { return embedding(ids); }
      ShardedEmbedding embedding;
    };
    Sequential model({ModuleLayer([one = sharded()] { return std::make_shared<Net>(one); })});
    compile(model, 4);
  });
  EXPECT_EQ(shared.size(), 2U);  // a server has one replica
  for (const auto& error : shared) expect_says(error, "replicas share a ShardedEmbedding");
  EXPECT_EQ(errors.size(), 3U);
  for (const auto& error : errors) {
    expect_says(error,
                "id 40 is out of range for the table \"sharded_embedding\": it has 40 rows, so ids are from 0 to 39");
  }
}

}  // namespace
}  // namespace lockstep
