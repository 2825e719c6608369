// Tests what ModelParallelStrategy refuses, each in one clear line; and loops of one's own on a mesh.
#include <torch/nn/modules/batchnorm.h>

#include "base/expect_says_testing.h"
#include "base/text.h"
#include "meshes.h"

namespace lockstep {
namespace {

// Returns the error of a strategy on this mesh, or of a model made in its scope, on every rank.
std::string refusal(const Axes& axes, const ModelParallelOptions& options, bool of_layers = false) {
  int ranks = 1;
  for (const auto& axis : axes) ranks *= axis.size;
  std::mutex mutex;
  std::string said;
  collective::on_ranks(ranks, [&](const Group& group) {
    const DeviceMesh mesh(axes, Communicator(group, 60));
    auto with = options;
    with.device = "cpu:0";
    with.threads_per_replica = 1;
    const auto message = message_of<Error>([&] {
      const ModelParallelStrategy strategy(mesh, with);
      const auto scope = strategy.scope();
      auto model = make_transformer_model("sgd", of_layers);
      model.build({kTransformer.sequence}, at::kLong);
    });
    const std::lock_guard lock(mutex);
    if (said.empty() || said.find("abort") != std::string::npos) said = message;
  });
  return said;
}

TEST(ModelParallelInput, OneClearLine) {
  initial_values();
  const ParallelPlan plan{{"1.qkv", ColwiseParallel()}};
  expect_says(refusal({{"data", 2}}, {.plan = plan}), "there is a plan, but the mesh has no axis \"tensor\"");
  expect_says(refusal({{"tensor", 2}}, {}), "axis \"tensor\" has size 2, but there is no plan for it");
  expect_says(refusal({{"sequence", 2}}, {}), "the mesh has an axis \"sequence\", which is none of");
  expect_says(refusal({{"tensor", 2}}, {.plan = plan, .layout_map = {{"1.qkv.weight", {"tensor", ""}}}}),
              "give one of them");
  expect_says(refusal({{"tensor", 2}}, {.plan = {{"1.qvk", ColwiseParallel()}}}), "did you mean 1.qkv");
  expect_says(refusal({{"tensor", 2}}, {.plan = {{"1.qkv.weight", ColwiseParallel()}}}),
              "which is the name of a parameter; this style is for its layer");
  expect_says(refusal({{"tensor", 5}}, {.plan = plan}), "cannot be divided among 5 ranks");
  expect_says(refusal({{"shard", 2}}, {.fully_shard = {.units = {"block"}}}),
              "fully_shard.units has \"block\", which matches nothing");
  expect_says(refusal({{"data", 2}}, {.fully_shard = {.units = {"1"}}}), "the mesh has no axis \"shard\"");
  expect_says(refusal({{"shard", 2}}, {.shard_optimizer_state = true}), "which divides all state");
  expect_says(refusal({{"data", 2}}, {.batch_axis = "tensor"}),
              "two of batch_axis, shard_axis, pipeline_axis, tensor_axis, context_axis and expert_axis are one");
  expect_says(refusal({{"data", 2}}, {.bucket_cap_mb = 0}), "bucket_cap_mb is 0; it must be above 0");
  expect_says(refusal({{"data", 2}}, {.compare_copies_every = -1}), "compare_copies_every is -1");
}

TEST(ModelParallelInput, OfStages) {
  initial_values();
  expect_says(refusal({{"pipeline", 2}}, {}), "a model that is one module cannot be cut into stages");
  expect_says(refusal({{"pipeline", 2}}, {.layers_of_stages = {1, 1, 2}}, true),
              "layers_of_stages has 3 stages; 2 ranks with 1 each have 2");
  expect_says(refusal({{"pipeline", 2}}, {.layers_of_stages = {1, 1}}, true), "together they must have all");
  expect_says(refusal({{"pipeline", 5}}, {}, true), "4 layers for 5 stages");
  expect_says(refusal({{"pipeline", 2}}, {.microbatches = 0}, true), "microbatches");
  expect_says(refusal({{"pipeline", 2}}, {.tied = {{"token.weight"}}}, true),
              "does not begin with the number of a layer");
  expect_says(refusal({{"pipeline", 2}}, {.tied = {{"0.token.weight", "3.heat.weight"}}}, true), "did you mean");
  expect_says(refusal({{"pipeline", 2}}, {.stages_per_rank = 0}, true), "stages_per_rank is 0");
  expect_says(refusal({{"data", 2}}, {.layers_of_stages = {4}}, true), "the mesh has no axis \"pipeline\"");
  expect_says(refusal({{"shard", 2}, {"pipeline", 2}}, {.tied = {{"0.token.weight", "3.head.weight"}}}, true),
              "tied parameters are for a mesh without");
}

TEST(ModelParallelInput, OfContextsAndExperts) {
  initial_values();
  const auto refused_in_fit = [&](int ranks, const ModelParallelOptions& options, const Dataset& data,
                                  const std::string& part, Reduction reduction = Reduction::sum_over_batch_size) {
    on_mesh({{"context", ranks}}, options, [&](const ModelParallelStrategy&) {
      auto model = make_transformer_model("sgd");
      model.compile(
          {.optimizer = "sgd", .loss = SparseCategoricalCrossentropy({.from_logits = true, .reduction = reduction})});
      // This rank throws the error of the others, or that one of them has failed.
      const auto said = message_of<Error>([&] { model.fit(data, {.verbose = 0, .handle_signals = false}); });
      expect_says(said, part);
    });
  };
  const auto ids = [](std::int64_t positions) { return at::zeros({4, positions}, at::kLong); };
  const auto sequences = [&](std::int64_t of_x, std::int64_t of_y) {
    return Dataset::from_tensor_slices(ids(of_x), ids(of_y)).batch(4);
  };
  const ModelParallelOptions places{.context_plan = {{"0.place.weight", Shard{0}}}};
  refused_in_fit(5, {}, sequences(12, 12), "x has 12 positions, which are no multiple of the 5 ranks");
  refused_in_fit(2, {.context_dim = 2}, sequences(12, 12), "x has shape [4, 12]; dimension 2 is context_dim");
  refused_in_fit(2, places, sequences(8, 8),
                 "x has 8 positions, and a parameter of context_plan has 12, which must be as many");
  refused_in_fit(2, places, sequences(12, 8), "y has shape [4, 8], and x has 12 positions");
  refused_in_fit(2, places, sequences(12, 12), "a loss with Reduction::sum is not for sequences that are divided",
                 Reduction::sum);
  expect_says(refusal({{"context", 2}}, {.context_dim = 0}), "context_dim is 0; it must be 1 or more");
  expect_says(refusal({{"context", 2}}, {.context_plan = {{"0.plaice", Shard{0}}}}), "did you mean 0.place?");
  expect_says(refusal({{"data", 2}}, {.context_plan = {{"0.place.weight", Shard{0}}}}), "no axis \"context\"");
  expect_says(refusal({{"shard", 2}, {"context", 2}}, {.context_plan = {{"0.place.weight", Shard{0}}}}),
              "context_plan is for a mesh without the axis \"shard\"");
  expect_says(refusal({{"shard", 2}, {"expert", 2}}, {}), "experts are for a mesh without the axis \"shard\"");
}

TEST(ModelParallelInput, OfLayoutMaps) {
  initial_values();
  const auto said = [](const LayoutMap& map) { return refusal({{"tensor", 2}}, {.layout_map = map}); };
  expect_says(said({{"1.qkv.weight", {"tensor"}}}), "has 1 dimensions; the parameter has shape [72, 24]");
  expect_says(said({{"1.qkv.weight", {"model", ""}}}), "is divided along \"model\"; it can be along \"tensor\"");
  expect_says(said({{"1.qkv.weight", {"tensor", "tensor"}}}), "divides two dimensions");
  expect_says(said({{"1.norm1.weight", {"tensor"}}}),
              "cannot be divided; weights and biases of linear layers, and embeddings, can");
  expect_says(said({{"1.qkv.bias", {"tensor"}}}), "is divided, but not the outputs of its layer's weight");
}

// A norm that is left out between layers with divided sequences trains differently on each rank: it is found.
TEST(ModelParallelInput, AStyleThatIsMissingIsFound) {
  const auto data = make_sequences();
  const Layout sequence = Shard{1};
  ParallelPlan plan{{"0.token", RowwiseParallel{.output = sequence}},
                    {"0.place", SequenceParallel()},
                    {"*.norm2", SequenceParallel()},
                    {"3.norm", SequenceParallel()},
                    {"*.qkv", ColwiseParallel{.input = sequence}},
                    {"*.out", RowwiseParallel{.output = sequence}},
                    {"*.up", ColwiseParallel{.input = sequence}},
                    {"*.down", RowwiseParallel{.output = sequence}},
                    {"3.head", ColwiseParallel{.input = sequence, .output = Replicate()}}};
  for (const bool whole : {false, true}) {
    if (whole) plan.emplace_back("*.norm1", SequenceParallel());
    on_mesh({{"tensor", 2}}, {.plan = plan, .compare_copies_every = 10}, [&](const ModelParallelStrategy&) {
      auto model = make_transformer_model(SGD({.learning_rate = 0.1}));
      const auto fit = [&] { model.fit(data, {.epochs = 3, .verbose = 0, .handle_signals = false}); };
      if (whole) return fit();
      expect_says(message_of<InvalidArgument>(fit), "norm1");
    });
  }
}

// Scaled losses: a step in which one rank's part of a gradient is not finite is one for none.
TEST(ModelParallelLoops, AllSkipAStepThatOverflowsOnOne) {
  const auto data = make_sequences();
  for (const auto& axes : {Axes{{"tensor", 2}}, Axes{{"shard", 2}}, Axes{{"data", 2}, {"tensor", 2}}}) {
    on_mesh(axes, {.plan = transformer_plan()}, [&](const ModelParallelStrategy& strategy) {
      auto model = Model([] {
        auto net = make_some_frozen();
        net->to(at::kFloat);
        return net;
      });
      // Sums of gradients, a few of which are too large for float.
      model.compile({.optimizer = LossScaleOptimizer(SGD({.learning_rate = 1e-3}), {.initial_scale = 0x1p122}),
                     .loss = SparseCategoricalCrossentropy({.from_logits = true, .reduction = Reduction::sum})});
      model.fit(data, {.epochs = 5, .verbose = 0, .handle_signals = false});
      EXPECT_LT(model.iterations(), 20) << name_of(axes);
      EXPECT_GT(model.iterations(), 10) << name_of(axes);
      strategy.mesh().ranks().check_all_agree(
          "loss scales", text(model.iterations(), " updates, then ", model.optimizer().loss_scale()));
    });
  }
}

// replicate, run, minimize and Checkpoint, on a mesh as on one device.
TEST(ModelParallelLoops, TrainAndSave) {
  const auto data = make_sequences();
  const auto path = testing::TempDir() + "/mesh_loop";
  const auto train = [&](const Strategy& strategy, int epochs, bool restores) {
    auto module = strategy.replicate(make_some_frozen);
    const auto optimizer = strategy.optimizer(Adam({.learning_rate = 1e-2, .global_clipnorm = 0.5}), module);
    Checkpoint checkpoint({{"module", module.trackable()}, {"optimizer", optimizer.trackable()}});
    if (restores) checkpoint.restore(path);
    for (int epoch = 0; epoch < epochs; ++epoch) {
      auto batches = strategy.distribute(data).iterate();
      while (const auto batch = batches.next()) {
        strategy.run(
            [&](ReplicaContext& replica, parallel::Transformer& net, const Example& part) {
              if (part.size() == 0) return optimizer.apply_gradients(replica, 0);
              const auto loss =
                  parallel::cross_entropy(net->forward(part.x), part.y) * static_cast<double>(part.size());
              optimizer.minimize(replica, loss, static_cast<double>(part.size()));
            },
            module, *batch);
      }
    }
    if (!restores) checkpoint.write(path);
    return whole_weights(ReplicatedModule(module));
  };
  const auto expected = train(OneDeviceStrategy("cpu:0", 1), 3, false);
  on_mesh({{"data", 2}, {"tensor", 2}}, {.plan = transformer_plan()}, [&](const ModelParallelStrategy& strategy) {
    EXPECT_LT(parallel::largest_difference(train(strategy, 3, false), expected), 1e-9);
    strategy.mesh().ranks().group().barrier(strategy.mesh().ranks().deadline());
  });
  const auto more = train(OneDeviceStrategy("cpu:0", 1), 2, true);
  on_mesh({{"shard", 2}}, {.fully_shard = {.units = {"1", "2"}}}, [&](const ModelParallelStrategy& strategy) {
    EXPECT_LT(parallel::largest_difference(train(strategy, 2, true), more), 1e-9);
  });
}

}  // namespace
}  // namespace lockstep
