// Ring attention against LibTorch's attention over the whole sequence, in double precision.
#include "lockstep/parallel/context_parallel.h"

#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "lockstep/parallel/gradients.h"
#include "lockstep/parallel/tensor_parallel.h"
#include "parallel/transformer_testing.h"

namespace lockstep::parallel {
namespace {

TEST(RingAttention, IsAttentionOverTheWholeSequence) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const bool is_causal : {false, true}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, causal " << is_causal);
      torch::manual_seed(1);
      std::vector<at::Tensor> whole;
      for (int i = 0; i < 3; ++i) whole.push_back(torch::randn({2, 3, 12, 5}, at::kDouble).requires_grad_());
      const auto weights = torch::randn({2, 3, 12, 5}, at::kDouble);
      const auto expected = at::scaled_dot_product_attention(whole[0], whole[1], whole[2], {}, 0, is_causal);
      (expected * weights).sum().backward();
      collective::on_ranks(ranks, [&](const Group& group) {
        const auto part = [&](const at::Tensor& x) {
          return x.detach().chunk(ranks, 2)[static_cast<std::size_t>(group.rank())].clone();
        };
        std::vector<at::Tensor> mine;
        for (const auto& each : whole) mine.push_back(part(each).requires_grad_());
        const auto output = ring_attention(mine[0], mine[1], mine[2], {group, 30}, {.is_causal = is_causal});
        EXPECT_TRUE(at::allclose(output, part(expected), 1e-12, 1e-12));
        (output * part(weights)).sum().backward();
        for (std::size_t i = 0; i < 3; ++i)
          EXPECT_TRUE(at::allclose(mine[i].grad(), part(whole[i].grad()), 1e-10, 1e-12)) << i;
      });
    }
  }
}

TEST(ContextParallel, TrainsAsOneProcess) {
  constexpr int kSteps = 50;
  auto whole = make_transformer();
  torch::optim::AdamW whole_adamw(whole->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < kSteps; ++step) {
    const auto batch = make_batch(step, 3);
    whole_adamw.zero_grad();
    cross_entropy(whole(batch.ids), batch.labels).backward();
    whole_adamw.step();
  }
  for (const int ranks : {2, 3, 4}) {
    SCOPED_TRACE(ranks);
    collective::on_ranks(ranks, [&](const Group& group) {
      const Communicator communicator(group, 30);
      auto net = make_transformer();
      parallelize_module(net, communicator, {{"*.place.weight", Shard{0}}});
      torch::optim::AdamW adamw(net->parameters(), torch::optim::AdamWOptions(1e-2));
      const ContextParallel context(communicator);
      for (int step = 0; step < kSteps; ++step) {
        const auto batch = make_batch(step, 3);
        adamw.zero_grad();
        cross_entropy(net(context.part(batch.ids, 1)), context.part(batch.labels, 1)).backward();
        average_gradients(net->parameters(), communicator);
        adamw.step();
      }
      auto mine = parameters_of(*net);
      for (auto& [name, parameter] : mine) parameter = full_tensor(parameter);
      EXPECT_LT(largest_difference(mine, parameters_of(*whole)), 1e-9);
    });
  }
}

TEST(ContextParallel, RefusesWhatDoesNotFit) {
  collective::on_ranks(2, [&](const Group& group) {
    const ContextParallel context({group, 30});
    const auto x = torch::randn({2, 3, 4, 5});
    expect_says(message_of<InvalidArgument>([&] {
                  at::scaled_dot_product_attention(x, x, x, torch::zeros({4, 4}));
                }),
                "a mask, dropout and grouped queries are not supported");
    expect_says(message_of<InvalidArgument>([&] { ring_attention(x, x.narrow(3, 0, 4), x, group); }),
                "query has shape [2, 3, 4, 5], key [2, 3, 4, 4]");
    expect_says(message_of<InvalidArgument>([&] {
                  context.part(torch::zeros({2, 5}), 1);
                }),
                "cannot be divided among 2 ranks");
  });
}

}  // namespace
}  // namespace lockstep::parallel
