// Ring attention against LibTorch's attention over the whole sequence, in double precision.
#include "lockstep/parallel/context_parallel.h"

#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <array>
#include <functional>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "collective/ranks_testing.h"
#include "lockstep/gradient/tensor_collectives.h"
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

// Each tensor's distance from one in double precision, of its norm: the output, then gradients of queries, keys,
// values.
using Distances = std::array<double, 4>;

Distances distances(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& exact) {
  Distances result{};
  for (std::size_t i = 0; i < result.size(); ++i)
    result[i] = ((tensors[i].to(at::kDouble) - exact[i]).norm() / exact[i].norm()).item<double>();
  return result;
}

TEST(RingAttention, IsAsExactIn16BitsAsAttentionOfOneProcess) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const bool is_causal : {false, true}) {
      for (const int ranks : {2, 4}) {
        torch::manual_seed(7);
        std::vector<at::Tensor> whole;
        for (int i = 0; i < 3; ++i)
          whole.push_back((torch::randn({1, 2, 256, 16}, at::kDouble) * (i == 0 ? 3 : 1) + (i == 2 ? 1 : 0)).to(dtype));
        using Attend = std::function<at::Tensor(const std::vector<at::Tensor>& of)>;
        const auto results = [&](const Attend& attend, auto change) {
          std::vector<at::Tensor> of;
          for (const auto& each : whole) of.push_back(at::Tensor(change(each)).clone().requires_grad_());
          const auto output = attend(of);
          output.sum().backward();
          return std::vector<at::Tensor>{output.detach(), of[0].grad(), of[1].grad(), of[2].grad()};
        };
        const Attend attention = [&](const auto& of) {
          return at::scaled_dot_product_attention(of[0], of[1], of[2], {}, 0, is_causal);
        };
        const auto exact = results(attention, [](const auto& x) { return x.to(at::kDouble); });
        const auto of_libtorch = distances(results(attention, [](const auto& x) { return x; }), exact);
        collective::on_ranks(ranks, [&](const Group& group) {
          const auto part = [&](const at::Tensor& x) {
            return x.chunk(ranks, 2)[static_cast<std::size_t>(group.rank())];
          };
          const auto own = results(
              [&](const auto& of) {
                return ring_attention(of[0], of[1], of[2], {group, 30}, {.is_causal = is_causal});
              },
              part);
          std::vector<at::Tensor> together;
          for (const auto& each : own)
            together.push_back(all_gather(group, each, Deadline::after(std::chrono::seconds(30)), 2));
          const auto of_ring = distances(together, exact);
          for (std::size_t i = 0; i < of_ring.size(); ++i)
            EXPECT_LE(of_ring[i], 2 * of_libtorch[i])
                << dtype << " causal " << is_causal << " ranks " << ranks << " " << i;
        });
      }
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

// The texts that both ranks throw, where `act` does other things on rank 0 than on rank 1.
std::string said_by_both(const std::function<void(const Communicator& ranks, bool is_first)>& act) {
  const auto errors = collective::run_ranks(
      {.group = {.backend = "tcp"}}, [&](const Group& group) { act(Communicator(group, 30), group.rank() == 0); });
  std::string said;
  for (const auto& error : errors) {
    EXPECT_NE(error, nullptr);
    if (error != nullptr) said += message_of([&] { std::rethrow_exception(error); });
  }
  return said;
}

// All attentions have the same sizes: mixed, a rank would attend to the keys of another layer.
TEST(ContextParallel, RanksInAnotherAttentionAreToldWhich) {
  const auto x = torch::randn({2, 3, 4, 5}, at::kDouble).requires_grad_();
  const auto by_purpose = said_by_both([&](const Communicator& ranks, bool is_first) {
    ring_attention(x, x, x, ranks.with_purpose(Purpose(is_first ? "attention of block 1" : "attention of block 2")));
  });
  expect_says(by_purpose, "for attention of block 1");
  expect_says(by_purpose, "for attention of block 2");
  const auto by_mask = said_by_both(
      [&](const Communicator& ranks, bool is_first) { ring_attention(x, x, x, ranks, {.is_causal = is_first}); });
  expect_says(by_mask, "for causal ring_attention");
  expect_says(by_mask, "for ring_attention");
  const auto as_many = x.detach().view({3, 2, 4, 5});
  const auto by_shape = said_by_both([&](const Communicator& ranks, bool is_first) {
    const ContextParallel context(ranks);
    const auto& mine = is_first ? x : as_many;
    at::scaled_dot_product_attention(mine, mine, mine);
  });
  expect_says(by_shape, "for attention 1 in ContextParallel (keys [2, 3, 4, 5], values [2, 3, 4, 5], scale 0.447214)");
  expect_says(by_shape, "for attention 1 in ContextParallel (keys [3, 2, 4, 5], values [3, 2, 4, 5], scale 0.447214)");
  const auto by_scale = said_by_both([&](const Communicator& ranks, bool is_first) {
    ContextParallel context(ranks);
    context.attention(x, x, x, {.scale = is_first ? 1 : 2});
  });
  expect_says(by_scale, "scale 1)");
  expect_says(by_scale, "scale 2)");
  const auto by_layer = said_by_both([&](const Communicator& ranks, bool is_first) {
    const ContextParallel context(ranks);
    for (const char* const layer : {is_first ? "block 1" : "block 2", is_first ? "block 2" : "block 1"}) {
      const ContextParallel of_layer(ranks.with_purpose(Purpose(layer)));
      at::scaled_dot_product_attention(x, x, x);
    }
  });
  expect_says(by_layer, "for block 1 (keys");
  expect_says(by_layer, "for block 2 (keys");
  const auto in_backward = said_by_both([&](const Communicator& ranks, bool is_first) {
    const ContextParallel context(ranks);
    const auto mine = x.detach().clone().requires_grad_();
    const auto first = at::scaled_dot_product_attention(mine, mine, mine),
               second = at::scaled_dot_product_attention(mine, mine, mine);
    (is_first ? first : second).sum().backward();
  });
  expect_says(in_backward, "for the backward of attention 1 in ContextParallel");
  expect_says(in_backward, "for the backward of attention 2 in ContextParallel");
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
