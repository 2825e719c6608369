// Tensor parallelism against one process that trains the whole module, in double precision.
#include "lockstep/parallel/tensor_parallel.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include <array>
#include <utility>
#include <vector>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "collective/ranks_testing.h"
#include "lockstep/parallel/device_mesh.h"
#include "parallel/equal_gradients.h"
#include "parallel/transformer_testing.h"

namespace lockstep::parallel {
namespace {

constexpr int kSteps = 50;
constexpr double kTensorTolerance = 1e-9;

ParallelPlan plain_plan() {
  return {{"*.token", RowwiseParallel()}, {"*.qkv", ColwiseParallel()},  {"*.out", RowwiseParallel()},
          {"*.up", ColwiseParallel()},    {"*.down", RowwiseParallel()}, {"*.head", ColwiseParallel()}};
}

// Between the layers the sequence is divided.
ParallelPlan sequence_plan() {
  const Layout sequence = Shard{1};
  return {{"*.token", RowwiseParallel{.output = sequence}},
          {"*.place", SequenceParallel()},
          {"*.norm*", SequenceParallel()},
          {"*.qkv", ColwiseParallel{.input = sequence}},
          {"*.out", RowwiseParallel{.output = sequence}},
          {"*.up", ColwiseParallel{.input = sequence}},
          {"*.down", RowwiseParallel{.output = sequence}},
          {"*.head", ColwiseParallel{.input = sequence}}};
}

template <class Loss>
void train(Transformer& net, const Loss& loss) {
  torch::optim::AdamW adamw(net->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < kSteps; ++step) {
    const auto batch = make_batch(step, 3 + step % 2);
    adamw.zero_grad();
    loss(net(batch.ids), batch.labels).backward();
    adamw.step();
  }
}

Parameters train_undivided() {
  auto net = make_transformer();
  train(net, cross_entropy);
  return parameters_of(*net);
}

void expect_as_whole(int ranks, const ParallelPlan& plan) {
  const auto expected = train_undivided();
  collective::on_ranks(ranks, [&](const Group& group) {
    const Communicator communicator(group, 30);
    auto net = make_transformer();
    parallelize_module(net, communicator, plan);
    train(net, [&](const at::Tensor& logits, const at::Tensor& labels) {
      return vocabulary_parallel_cross_entropy(logits, labels, communicator).mean();
    });
    auto whole = parameters_of(*net);
    for (auto& [name, parameter] : whole) parameter = full_tensor(parameter);
    EXPECT_LT(largest_difference(whole, expected), kTensorTolerance);
  });
}

TEST(TensorParallel, TrainsAsOneProcess) {
  for (const int ranks : {1, 2, 3, 4}) {
    SCOPED_TRACE(ranks);
    expect_as_whole(ranks, plain_plan());
  }
}

TEST(TensorParallel, TrainsAsOneProcessWithTheSequenceDivided) {
  for (const int ranks : {1, 2, 3, 4}) {
    SCOPED_TRACE(ranks);
    expect_as_whole(ranks, sequence_plan());
  }
}

void expect_refused(const ParallelPlan& plan, const std::string& message, int ranks = 2) {
  collective::on_ranks(ranks, [&](const Group& group) {
    auto net = make_transformer();
    expect_says(message_of<InvalidArgument>([&] { parallelize_module(net, group, plan); }), message);
  });
}

TEST(TensorParallel, RefusesPlansThatDoNotFit) {
  expect_refused({{"*.qvk", ColwiseParallel()}}, "no module is called \"*.qvk\"; did you mean *.qkv?");
  expect_refused({{"*.norm1", ColwiseParallel()}}, "1.norm1 has no weight of two dimensions");
  expect_refused({{"*.head", ColwiseParallel()}},
                 "dimension 0 of 3.head.weight, of size 48, cannot be divided among 5 ranks", 5);
  expect_refused({{"*.qkv", ColwiseParallel{.input = Shard{-1}}}}, "input may be Replicate");
  expect_refused({{"*.out", RowwiseParallel{.output = Shard{-1}}}}, "output may be Replicate");
  expect_refused({{"*.norm*", SequenceParallel()}, {"1.norm1", SequenceParallel()}},
                 "two entries of the plan are for 1.norm1.weight");
  expect_refused({{"1", SequenceParallel()}, {"*.up", ColwiseParallel()}},
                 "two entries of the plan are for 1.up.weight");
  expect_refused({{"*.place.weight", Shard{2}}}, "Shard{2} of 0.place.weight, which has shape [12, 24]");
}

TEST(TensorParallel, RefusesRanksWhosePlansDiffer) {
  collective::on_ranks(2, [&](const Group& group) {
    auto net = make_transformer();
    const ParallelPlan plan{{group.rank() == 0 ? "*.up" : "*.qkv", ColwiseParallel()}};
    expect_says(message_of<InvalidArgument>([&] { parallelize_module(net, group, plan); }), "differ");
  });
}

TEST(TensorParallel, NamesTheLayerWhoseInputDoesNotFit) {
  collective::on_ranks(2, [&](const Group& group) {
    auto net = make_transformer();
    parallelize_module(net, group, {{"*.out", RowwiseParallel()}});
    expect_says(message_of<InvalidArgument>([&] { net(make_batch(0, 2).ids); }),
                "RowwiseParallel 1.out: the input has shape [2, 12, 24]; its last dimension must be 12");
  });
}

// Each rank's own batch, as loops of data parallelism give it.
TEST(TensorParallel, RefusesRanksThatGiveOtherInputs) {
  const auto x = torch::randn({2, 64, 6});
  collective::on_ranks(2, [&](const Group& group) {
    auto ids = make_transformer();
    parallelize_module(ids, group, plain_plan());
    expect_says(message_of<InvalidArgument>([&] { ids(make_batch(group.rank(), 3).ids); }),
                "the inputs that 2 ranks give 0.token differ: they have other values");
    expect_says(message_of<InvalidArgument>([&] { ids(make_batch(0, 3 + group.rank()).ids); }),
                "they have 36 to 48 elements");

    torch::nn::Sequential features(torch::nn::Linear(6, 4), torch::nn::Tanh(), torch::nn::Linear(4, 2));
    parallelize_module(features, group, {{"0", ColwiseParallel()}, {"2", RowwiseParallel()}});
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      features->to(dtype);
      features->forward(x[0].to(dtype));
      features->forward(at::zeros({0, 6}, dtype));
    }
    for (int call = 5; call < 8; ++call) features->forward(x[group.rank()].to(at::kBFloat16));  // not compared
    expect_says(message_of<InvalidArgument>([&] { features->forward(x[group.rank()].to(at::kBFloat16)); }),
                "the inputs that 2 ranks give 0 differ");
  });
}

TEST(ComparedCalls, AreCountedAnewAfterARegroup) {
  const auto groups = make_thread_groups(2), later = make_thread_groups(2);
  const Communicator ranks(groups[0], 30);
  ComparedCalls calls(ranks);
  const auto next = [&] { return std::array{calls.next_is_one(), calls.next_is_one(), calls.next_is_one()}; };
  EXPECT_EQ(next(), (std::array{true, true, false}));
  ranks.regroup(later[0]);
  EXPECT_EQ(next(), (std::array{true, true, false}));
}

TEST(TensorParallel, RefusesRanksThatGiveOtherLabels) {
  using Labels = std::vector<std::int64_t>;
  const auto logits = torch::randn({3, 4});
  collective::on_ranks(2, [&](const Group& group) {
    for (const auto& [one, other] :
         {std::pair(Labels{1, 2, 5}, Labels{1, 2, 6}), std::pair(Labels{2}, Labels{3}),
          std::pair(Labels{3, 3, 3}, Labels{7, 7, 7}), std::pair(Labels{5, -100}, Labels{5, 0})}) {
      for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
        const auto loss = [&](const Labels& labels) {
          const auto own = logits.narrow(0, 0, static_cast<std::int64_t>(labels.size())).to(dtype) + group.rank();
          return vocabulary_parallel_cross_entropy(own, torch::tensor(labels), group);
        };
        loss(one);
        expect_says(message_of<InvalidArgument>([&] { loss(group.rank() == 0 ? one : other); }),
                    "the labels differ between the 2 ranks that divide the classes");
      }
    }
  });
}

// Its loss and gradient in 16 bits, each against double precision: at most twice as far from it as LibTorch's. So is
// the gradient at the labels, which is small where the model is sure: in every other example its logit leads by up
// to 9.
TEST(TensorParallel, TheDividedLossIsAsExactIn16BitsAsLibTorchs) {
  const auto labels = at::arange(32).remainder(17) * 7;
  const auto exact = at::linspace(-9, 9, 32 * 128, at::kDouble).mul(31).sin().mul(8).view({32, 128});
  for (int i = 0; i < 32; i += 2) exact[i][labels[i].item<std::int64_t>()] = exact[i].max() + 5 + 0.25 * (i / 2);
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto rounded = exact.to(dtype);
    const auto results_of = [&](const at::Tensor& logits, const auto& loss) {
      const auto leaf = logits.detach().clone().requires_grad_();
      const at::Tensor losses = loss(leaf);
      losses.sum().backward();
      return std::pair(losses.detach().to(at::kDouble), leaf.grad().to(at::kDouble));
    };
    const auto whole = [&](const at::Tensor& logits) {
      return at::cross_entropy_loss(logits, labels, {}, at::Reduction::None);
    };
    const auto expected = results_of(rounded.to(at::kDouble), whole), theirs = results_of(rounded, whole);
    collective::on_ranks(2, [&](const Group& group) {
      const auto ours = results_of(rounded.narrow(1, 64 * group.rank(), 64), [&](const at::Tensor& logits) {
        return vocabulary_parallel_cross_entropy(logits, labels, group);
      });
      const auto error = [](const at::Tensor& a, const at::Tensor& b) { return (a - b).norm().item<double>(); };
      EXPECT_LE(error(ours.first, expected.first), 2 * error(theirs.first, expected.first));
      const auto part = [&](const at::Tensor& all) { return all.narrow(1, 64 * group.rank(), 64); };
      EXPECT_LE(error(ours.second, part(expected.second)), 2 * error(part(theirs.second), part(expected.second)));
      const auto at_labels = part(at::one_hot(labels, 128)).to(at::kBool);
      const auto relative = [&](const at::Tensor& values) {
        return (values / part(expected.second) - 1).masked_select(at_labels).abs().max().item<double>();
      };
      EXPECT_LE(relative(ours.second), 2 * relative(part(theirs.second)));
    });
  }
}

TEST(TensorParallel, DividesAFusedLayerInParts) {
  // Queries, keys and values one after the other: each rank gets some of each.
  torch::manual_seed(5);
  torch::nn::Linear whole(4, 12);
  const auto x = torch::randn({3, 4});
  const auto expected = whole(x).chunk(3, -1);
  collective::on_ranks(2, [&](const Group& group) {
    torch::nn::Linear layer(4, 12);
    {
      const at::NoGradGuard no_gradient;
      layer->weight.copy_(whole->weight);
      layer->bias.copy_(whole->bias);
    }
    parallelize_module(layer, group, {{"", ColwiseParallel{.parts = 3}}});
    const auto parts = layer(x).chunk(3, -1);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(at::allclose(parts[i], expected[i].chunk(2, -1)[static_cast<std::size_t>(group.rank())]));
    }
    EXPECT_TRUE(full_tensor(layer->weight).equal(whole->weight));
    EXPECT_TRUE(full_tensor(layer->bias).equal(whole->bias));
  });
}

TEST(TensorParallel, StaysWhenTheModuleIsMoved) {
  collective::on_ranks(2, [&](const Group& group) {
    auto net = make_transformer();
    const auto expected = net(make_batch(0, 2).ids);
    parallelize_module(net, group, {{"*.up", ColwiseParallel()}, {"*.down", RowwiseParallel()}});
    net->to(at::kFloat);
    net->to(at::kDouble);
    EXPECT_TRUE(at::allclose(net(make_batch(0, 2).ids), expected, 1e-4, 1e-4));
  });
}

TEST(TensorParallel, StaysWhenValuesAreLoaded) {
  collective::on_ranks(2, [&](const Group& group) {
    const ParallelPlan plan{{"*.up", ColwiseParallel()}, {"*.down", RowwiseParallel()}};
    auto net = make_transformer(), whole = make_transformer();
    parallelize_module(net, group, plan);
    const auto expected = net(make_batch(0, 2).ids);
    std::stringstream part, all;
    torch::save(net, part);
    torch::save(whole, all);
    {
      const at::NoGradGuard no_gradient;
      for (const auto& parameter : net->parameters()) parameter.detach().zero_();
    }
    torch::load(net, part);
    EXPECT_TRUE(at::allclose(net(make_batch(0, 2).ids), expected));
    expect_says(message_of<InvalidArgument>([&] { torch::load(net, all); }),
                "load the whole before parallelize_module");
  });
}

// A norm of one's own, which takes its weight by a view.
struct ScaleImpl : torch::nn::Module {
  ScaleImpl() : weight(register_parameter("weight", torch::full({4}, 2.0, at::kDouble))) {}
  at::Tensor forward(const at::Tensor& x) { return x * weight.view({1, 1, -1}) + weight.unsqueeze(0); }
  at::Tensor weight;
};
TORCH_MODULE(Scale);

TEST(TensorParallel, SequencePartsAreSummedOnce) {
  const auto x = at::arange(24, at::kDouble).view({1, 6, 4});
  Scale whole;
  whole(x).pow(2).sum().backward();
  collective::on_ranks(2, [&](const Group& group) {
    Scale net;
    parallelize_module(net, group, {{"", SequenceParallel()}});
    net(x.chunk(2, 1)[static_cast<std::size_t>(group.rank())]).pow(2).sum().backward();
    EXPECT_TRUE(at::allclose(net->weight.grad(), whole->weight.grad()));
  });
}

TEST(TensorParallel, MayBeDifferentiatedTwice) {
  const auto penalty = [](torch::nn::Linear& layer, const at::Tensor& x) {
    const auto of_x = torch::autograd::grad({at::tanh(layer(x)).pow(2).sum()}, {x}, {}, /*retain_graph=*/true,
                                            /*create_graph=*/true)[0];
    of_x.pow(2).sum().backward();
  };
  const auto make = [] {
    torch::nn::Linear layer(4, 6);
    const at::NoGradGuard no_gradient;
    layer->to(at::kDouble);
    layer->weight.copy_(at::sin(at::arange(24).view({6, 4})));
    layer->bias.copy_(at::cos(at::arange(6)));
    return layer;
  };
  const auto x = at::cos(at::arange(12, at::kDouble).view({3, 4}));
  auto whole = make();
  penalty(whole, x.clone().requires_grad_());
  collective::on_ranks(2, [&](const Group& group) {
    auto layer = make();
    parallelize_module(layer, group, {{"", ColwiseParallel()}});
    penalty(layer, x.clone().requires_grad_());
    EXPECT_TRUE(
        at::allclose(layer->weight.grad(), whole->weight.grad().chunk(2)[static_cast<std::size_t>(group.rank())]));
  });
}

TEST(TensorParallel, RefusesIdsAndLabelsThatDoNotExist) {
  collective::on_ranks(2, [&](const Group& group) {
    auto net = make_transformer();
    parallelize_module(net, group, plain_plan());
    expect_says(message_of<InvalidArgument>([&] {
                  net(at::full({1, 12}, 48, at::kLong));
                }),
                "the id 48 is not below the number of ids, 48");
    expect_says(message_of<InvalidArgument>([&] {
                  vocabulary_parallel_cross_entropy(torch::randn({2, 24}), at::full({2}, 48, at::kLong), group);
                }),
                "the label 48 is no class; there are 48");
  });
}

}  // namespace
}  // namespace lockstep::parallel
