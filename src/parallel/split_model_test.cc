// Models that are trained by a split. Ranks are threads.
#include <gtest/gtest.h>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "lockstep/parallel/split.h"
#include "parallel/transformer_testing.h"

namespace lockstep::parallel {
namespace {

const TransformerOptions kSplitOptions{.layers = 2};

// The layers of make_transformer, with its values.
std::vector<PipelineStage> transformer_layers() {
  std::vector<PipelineStage> layers;
  const auto add = [&]<class Layer>(std::type_identity<Layer>) {
    layers.emplace_back([number = layers.size()] {
      return std::dynamic_pointer_cast<Layer>(make_transformer(kSplitOptions)->layers[number]);
    });
  };
  add(std::type_identity<FrontImpl>());
  for (std::int64_t i = 0; i < kSplitOptions.layers; ++i) add(std::type_identity<BlockImpl>());
  add(std::type_identity<BackImpl>());
  return layers;
}

at::Tensor mean_loss(const at::Tensor& logits, const at::Tensor& labels, const Communicator& /*tensor*/) {
  return cross_entropy(logits, labels);
}

TEST(SplitModel, ZeroGathersAndLoadsTheValues) {
  const auto batch = make_batch(0, 8, kSplitOptions);
  const auto expected = parameters_of(*make_transformer(kSplitOptions));
  for (const auto sharding : {Sharding::gradients, Sharding::parameters}) {
    collective::on_ranks(4, [&](const Group& group) {
      const Split split{.data = 2, .pipeline = 2, .sharding = sharding, .microbatches = 2, .layers_of_stages = {2, 2}};
      const DeviceMesh mesh(split.axes(), {group, 60});
      SplitModel model(transformer_layers(), split, mesh);
      ASSERT_NE(model.sharded(), nullptr);
      const auto before = model.sharded()->gather();
      EXPECT_EQ(before.empty(), mesh.coordinate("data") != 0);
      if (mesh.coordinate("data") == 0) {
        const std::string part = mesh.coordinate("pipeline") == 0 ? "1.qkv.weight" : "3.head.weight";
        EXPECT_TRUE(before.contains(part));
        EXPECT_EQ(largest_difference(before, expected), 0);
      }
      const auto first = model.step(batch.ids, batch.labels, mean_loss);
      const at::NoGradGuard no_gradient;
      for (const auto& each : model.parameters()) each.add_(0.1 * each.grad());
      const auto changed = model.sharded()->gather();
      EXPECT_TRUE(changed.empty() || largest_difference(changed, expected) > 0);
      model.sharded()->load(before);
      const at::AutoGradMode gradient(true);
      EXPECT_EQ(model.step(batch.ids, batch.labels, mean_loss), first);
    });
  }
}

TEST(SplitModel, AnErrorOfOneRankEndsTheOthersSteps) {
  const auto batch = make_batch(0, 4, kSplitOptions);
  const ParallelPlan patterns{{"*.up", ColwiseParallel()}, {"*.down", RowwiseParallel()}};
  for (const Split& split :
       {Split{.data = 2}, Split{.tensor = 2}, Split{.data = 2, .sharding = Sharding::parameters}}) {
    SCOPED_TRACE(split.describe());
    const auto start = Deadline::Clock::now();
    collective::on_ranks(2, [&](const Group& group) {
      const DeviceMesh mesh(split.axes(), {group, 60});
      SplitModel model(transformer_layers(), split, mesh, patterns);
      const auto loss = [&](const at::Tensor& logits, const at::Tensor& labels, const Communicator& tensor) {
        if (mesh.ranks().rank() == 1) throw std::runtime_error("this rank's loss has failed");
        return mean_loss(logits, labels, tensor);
      };
      std::string said;
      try {
        model.step(batch.ids, batch.labels, loss);
      } catch (const std::exception& error) {
        said = error.what();
      }
      expect_says(said, "this rank's loss has failed");
    });
    EXPECT_LT(Deadline::Clock::now() - start, std::chrono::seconds(20));
  }
}

TEST(SplitModel, HasNoShardsWhereTheSplitDoesNotShard) {
  collective::on_ranks(1, [&](const Group& group) {
    const DeviceMesh mesh(Split().axes(), group);
    SplitModel model(transformer_layers(), {}, mesh);
    EXPECT_EQ(model.sharded(), nullptr);
  });
}

}  // namespace
}  // namespace lockstep::parallel
