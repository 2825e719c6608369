// average_gradients where gradients are not there, sparse, or of unequal numbers of examples; ranks are threads.
#include "lockstep/parallel/gradients.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include "collective/on_ranks_testing.h"
#include "lockstep/parallel/device_mesh.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/tensor_parallel.h"

namespace lockstep::parallel {
namespace {

// Weight decay would move a parameter with a gradient of zeros.
TEST(AverageGradients, AParameterThatNoRankUsesStaysAsOneProcessLeavesIt) {
  collective::on_ranks(2, [](const Group& group) {
    const auto used = at::ones({2}, at::kDouble).set_requires_grad(true), by_one = used.detach().clone(),
               unused = used.detach().clone(), frozen = used.detach().clone();
    by_one.set_requires_grad(true);
    unused.set_requires_grad(true);
    const std::vector<Tensor> all{used, by_one, unused, frozen};
    torch::optim::AdamW adamw(all, torch::optim::AdamWOptions(0.1).weight_decay(0.5));
    auto loss = used.sum() * (group.rank() + 1);
    if (group.rank() == 1) loss = loss + by_one.sum();
    loss.backward();
    average_gradients(all, {group, 30}, group.rank() == 0 ? 3 : 1);
    EXPECT_TRUE(at::allclose(used.grad(), at::full({2}, (3 * 1 + 1 * 2) / 4.0, at::kDouble)));
    EXPECT_TRUE(at::allclose(by_one.grad(), at::full({2}, 1 / 4.0, at::kDouble)));
    EXPECT_FALSE(unused.grad().defined());
    EXPECT_FALSE(frozen.grad().defined());
    adamw.step();
    EXPECT_TRUE(at::equal(unused, frozen));
    EXPECT_FALSE(at::equal(used, frozen));
  });
}

TEST(AverageGradients, SparseGradientsBecomeDenseMeans) {
  collective::on_ranks(2, [](const Group& group) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    table(at::tensor({group.rank(), 2}, at::kLong)).sum().backward();
    ASSERT_TRUE(table->weight.grad().is_sparse());
    average_gradients(table->parameters(), {group, 30});
    const auto expected = at::tensor({0.5F, 0.5F, 1.0F, 0.0F}).unsqueeze(1).expand({4, 2});
    EXPECT_TRUE(at::equal(table->weight.grad(), expected));
  });
}

// Each rank along the other axis has a parameter of its own, whose gradients are sums over all ranks already.
TEST(AverageGradients, MeansOverAnAxisOfPartsAreOfEachPart) {
  struct PlacesImpl : torch::nn::Module {
    PlacesImpl() { weight = register_parameter("weight", at::sin(at::arange(8, at::kDouble)).view({4, 2})); }
    at::Tensor weight;
  };
  const auto x = at::cos(at::arange(8, at::kDouble)).view({4, 2});
  collective::on_ranks(4, [&](const Group& group) {
    const DeviceMesh mesh({{"shard", 2}, {"context", 2}}, {group, 30});
    const auto net = std::make_shared<PlacesImpl>();
    parallelize_module(*net, mesh["context"], {{"weight", Shard{0}}});
    FullyShardedParameters sharded(mesh["shard"]);
    sharded.add(*net);
    const auto own = x.chunk(2)[static_cast<std::size_t>(mesh.coordinate("context"))];
    (net->weight * own).mean().backward();
    average_gradients(sharded.parameters(), mesh["context"]);
    double sum = 0;
    for (const auto& shard : sharded.parameters()) sum += shard.grad().sum().item<double>();
    mesh["shard"].sum({&sum, 1});
    EXPECT_NEAR(sum, (own / 8).sum().item<double>(), 1e-12);
  });
}

}  // namespace
}  // namespace lockstep::parallel
