// Operators on divided parameters that no layer's style knows, against one process, in double precision.
#include "parallel/divided_parameter.h"

#include <gtest/gtest.h>
#include <torch/nn/functional/normalization.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/optim/sgd.h>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "lockstep/parallel/tensor_parallel.h"

namespace lockstep::parallel {
namespace {

namespace F = torch::nn::functional;

// Values that need no generator, since ranks are threads.
at::Tensor waves(at::IntArrayRef sizes, double phase) {
  return at::sin(at::arange(c10::multiply_integers(sizes), at::kDouble) * 1.7 + phase).view(sizes);
}

struct ReadingNetImpl : torch::nn::Module {
  ReadingNetImpl() {
    below = register_parameter("below", waves({6, 6}, 0.1));
    layer = register_module("layer", torch::nn::Linear(6, 8));
    layer->to(at::kDouble);
    a = register_parameter("a", waves({2, 6}, 0.2));
    b = register_parameter("b", waves({8, 2}, 0.3));
    scale = register_parameter("scale", waves({}, 0.9));
    const at::NoGradGuard no_gradient;
    layer->weight.copy_(waves({8, 6}, 0.4));
    layer->bias.copy_(waves({8}, 0.5));
  }
  at::Tensor below, a, b, scale;
  torch::nn::Linear layer = nullptr;
};
TORCH_MODULE(ReadingNet);

using Way =
    std::function<at::Tensor(ReadingNetImpl& net, const at::Tensor& x)>;  // to outputs [examples, 8], or a scalar

std::vector<std::pair<const char*, Way>> ways_to_read() {
  const auto mask = waves({8, 6}, 3).gt(0).to(at::kDouble);
  return {
      {"einsum",
       [](auto& net, const auto& x) {
         return at::einsum("bd,vd->bv", {x, net.layer->weight});
       }},
      {"mask", [=](auto& net, const auto& x) { return torch::linear(x, net.layer->weight * mask, net.layer->bias); }},
      {"LoRA", [](auto& net, const auto& x) { return torch::linear(x, net.layer->weight + net.b.mm(net.a)); }},
      {"weight norm",
       [](auto& net, const auto& x) {
         return torch::linear(x, net.layer->weight / net.layer->weight.norm(2, {1}, /*keepdim=*/true));
       }},
      {"normalized rows",
       [](auto& net, const auto& x) {
         return torch::linear(x, F::normalize(net.layer->weight, F::NormalizeFuncOptions().dim(1)));
       }},
      {"normalized columns",
       [](auto& net, const auto& x) {
         return torch::linear(x, F::normalize(net.layer->weight, F::NormalizeFuncOptions().dim(0)));
       }},
      {"transposed product", [](auto& net, const auto& x) { return at::matmul(net.layer->weight, x.t()).t(); }},
      {"trained scale", [](auto& net, const auto& x) { return torch::linear(x, net.layer->weight * net.scale); }},
      {"penalty",
       [](auto& net, const auto& x) { return x.pow(2).mean() + net.layer->weight.norm() + net.layer->bias.norm(); }},
      {"squares", [](auto& net, const auto& x) { return x.pow(2).mean() + net.layer->weight.pow(2).sum(); }},
      {"chunks",
       [](auto& net, const auto& x) {
         const auto parts = net.layer->weight.chunk(2, 0);
         return at::cat({torch::linear(x, parts[0]), 2 * torch::linear(x, parts[1])}, -1);
       }},
      {"three dimensions",
       [](auto& net, const auto& x) { return (x.unsqueeze(1) * net.layer->weight.unsqueeze(0)).sum(-1); }},
      {"reshaped",
       [](auto& net, const auto& x) {
         return x.mm(net.layer->weight.view({1, -1, 6}).squeeze(0).t());
       }},
      {"embedding", [](auto& net, const auto& x) {
         return torch::embedding(net.layer->weight, at::arange(6, at::kLong)).mm(x.t()).pow(3).sum();
       }}};
}

void read_and_differentiate(ReadingNetImpl& net, const Way& way, at::Tensor& loss) {
  const auto y = way(net, torch::tanh(torch::linear(waves({3, 6}, 0.7), net.below)));
  loss = y.dim() == 0 ? y : (y * waves({3, 8}, 0.8)).sum() + y.pow(2).sum();
  loss.backward();
}

void expect_reads_as_one_process(int ranks, const ParallelPlan& plan) {
  for (const auto& [name, way] : ways_to_read()) {
    SCOPED_TRACE(name);
    ReadingNet whole;
    at::Tensor expected;
    read_and_differentiate(*whole, way, expected);
    collective::on_ranks(ranks, [&, &name = name, &way = way](const Group& group) {
      SCOPED_TRACE(testing::Message() << name << " on rank " << group.rank());
      ReadingNet net;
      parallelize_module(net, {group, 30}, plan);
      at::Tensor loss;
      read_and_differentiate(*net, way, loss);
      EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-10);
      const auto parameters = whole->named_parameters();
      for (const auto& each : net->named_parameters()) {
        const auto& wanted = parameters[each.key()].grad();
        ASSERT_EQ(each.value().grad().defined(), wanted.defined()) << each.key();
        if (!wanted.defined()) continue;
        const auto division = division_of(each.value());
        const auto part = division == nullptr ? wanted : division->part_of(wanted);
        EXPECT_TRUE(at::allclose(each.value().grad(), part, 1e-9, 1e-12)) << each.key();
      }
      const at::NoGradGuard no_gradient;  // evaluates to the same
      const auto x = torch::tanh(torch::linear(waves({3, 6}, 0.7), net->below));
      EXPECT_TRUE(at::allclose(way(*net, x), way(*whole, x), 1e-9, 1e-12));
    });
  }
}

TEST(OtherOperators, TakeTheWholeOfAColumnParallelWeight) {
  for (const int ranks : {2, 4}) expect_reads_as_one_process(ranks, {{"layer", ColwiseParallel()}});
}

TEST(OtherOperators, TakeTheWholeOfARowParallelWeight) {
  for (const int ranks : {2, 3}) {
    expect_reads_as_one_process(ranks, {{"layer", RowwiseParallel{.input = Replicate()}}});
  }
}

TEST(OtherOperators, OfACopyOrAMultipleStayTheLayers) {
  const auto x = waves({3, 6}, 0.7);
  const auto expected = torch::linear(x, ReadingNet()->layer->weight * 2.0).detach();
  collective::on_ranks(2, [&](const Group& group) {
    ReadingNet net;
    parallelize_module(net, {group, 30}, {{"layer", ColwiseParallel()}});
    const auto part = expected.chunk(2, -1)[static_cast<std::size_t>(group.rank())];
    EXPECT_TRUE(at::allclose(torch::linear(x, net->layer->weight * 2.0), part));
    EXPECT_TRUE(
        at::allclose(torch::linear(x, net->layer->weight.to(at::kFloat).to(at::kDouble)), part / 2, 1e-6, 1e-6));
  });
}

// Its part is square: sizes and strides do not tell which dimension is divided.
TEST(OtherOperators, TakeTheWholeOfATransposedCopy) {
  const auto value = waves({8, 4}, 0.4);
  const auto read = [](const at::Tensor& weight) { return weight.t().contiguous().norm(2, {1}).sum(); };
  collective::on_ranks(2, [&](const Group& group) {
    torch::nn::Sequential net{torch::nn::Linear(torch::nn::LinearOptions(4, 8).bias(false))};
    net->to(at::kDouble);
    const auto weight = net->parameters()[0];
    const at::NoGradGuard no_gradient;
    weight.copy_(value);
    parallelize_module(*net, {group, 30}, {{"0", ColwiseParallel()}});
    EXPECT_NEAR(read(weight).item<double>(), read(value).item<double>(), 1e-12);
  });
}

// The first call leaves the second layer whole, whose gradients are then of its parts.
TEST(OtherOperators, LayersMayBeDividedOneAfterTheOther) {
  const auto make = [] {
    torch::nn::Sequential net{torch::nn::Linear(4, 8), torch::nn::Linear(8, 4)};
    net->to(at::kDouble);
    double phase = 0;
    const at::NoGradGuard no_gradient;
    for (const auto& parameter : net->parameters()) parameter.copy_(waves(parameter.sizes(), phase += 0.3));
    return net;
  };
  const auto x = waves({3, 4}, 0.7);
  auto whole = make();
  whole->forward(x).pow(2).sum().backward();
  collective::on_ranks(2, [&](const Group& group) {
    auto net = make();
    parallelize_module(*net, {group, 30}, {{"0", ColwiseParallel{.output = Replicate()}}});
    parallelize_module(*net, {group, 30}, {{"1", ColwiseParallel{.output = Replicate()}}});
    net->forward(x).pow(2).sum().backward();
    const auto expected = whole->parameters();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const auto division = division_of(net->parameters()[i]);
      ASSERT_NE(division, nullptr);
      EXPECT_TRUE(at::allclose(net->parameters()[i].grad(), division->part_of(expected[i].grad()))) << i;
    }
  });
}

// A layer under two names, and a second call, whose whole parameters the first one watches already.
TEST(OtherOperators, WholeParametersMayBeWatchedTwice) {
  collective::on_ranks(2, [&](const Group& group) {
    torch::nn::Sequential net{torch::nn::Linear(4, 4), torch::nn::Linear(4, 4), torch::nn::Linear(4, 4)};
    net->push_back(net->ptr<torch::nn::LinearImpl>(0));
    for (const char* const name : {"1", "2"})
      parallelize_module(*net, {group, 30}, {{name, ColwiseParallel{.output = Replicate()}}});
    net->forward(at::ones({3, 4})).sum().backward();
    EXPECT_TRUE(net->parameters()[0].grad().defined());
  });
}

TEST(OtherOperators, ChangeADividedParameterInPlace) {
  const auto mask = waves({8, 6}, 3).gt(0).to(at::kDouble), other = waves({8, 6}, 5);
  const std::vector<std::pair<const char*, std::function<void(const at::Tensor&)>>> changes{
      {"clamp_", [](const auto& w) { w.clamp_(-0.5, 0.5); }},
      {"mul_ of a mask", [&](const auto& w) { w.mul_(mask); }},
      {"copy_", [&](const auto& w) { w.copy_(other); }},
      {"copy_ through data", [&](const auto& w) { w.data().copy_(other); }},
      {"mul_ of a row", [&](const auto& w) { w.mul_(other[0]); }},
      {"masked_fill_", [&](const auto& w) { w.masked_fill_(mask.gt(0), 7); }},
      {"tril_", [](const auto& w) { w.tril_(); }},
      {"index_fill_",
       [](const auto& w) {
         w.index_fill_(0, at::tensor({0, 5}, at::kLong), 3);
       }},
      {"its own norm", [](const auto& w) { w.div_(w.norm(2, {1}, true)); }},
      {"a moving average", [&](const auto& w) { w.mul_(0.9).add_(w.detach().clone(), 0.1).lerp_(other, 0.5); }}};
  for (const auto& [name, change] : changes) {
    SCOPED_TRACE(name);
    const at::NoGradGuard no_gradient;
    ReadingNet whole;
    change(whole->layer->weight);
    collective::on_ranks(2, [&, &name = name, &change = change](const Group& group) {
      const at::NoGradGuard no_gradient_here;
      ReadingNet net;
      parallelize_module(net, {group, 30}, {{"layer", ColwiseParallel()}});
      change(net->layer->weight);
      EXPECT_TRUE(at::allclose(full_tensor(net->layer->weight), whole->layer->weight)) << name;
      const auto all = torch::nn::utils::parameters_to_vector({net->layer->weight});
      EXPECT_TRUE(at::allclose(all, whole->layer->weight.flatten())) << name;
    });
  }
}

TEST(OtherOperators, AreRefusedWhereTheyCouldMeanThePart) {
  const auto expect_refused = [](const std::string& message, const std::function<void(const at::Tensor&)>& act) {
    collective::on_ranks(2, [&](const Group& group) {
      ReadingNet net;
      parallelize_module(net, {group, 30}, {{"layer", ColwiseParallel()}});
      expect_says(message_of<InvalidArgument>([&] { act(net->layer->weight); }), message);
    });
  };
  const std::string whose = "of layer.weight, of which this rank of 2 has a part, ColwiseParallel, ";
  expect_refused("aten::slice " + whose + "along the divided dimension", [](const auto& w) { w.slice(0, 0, 2); });
  expect_refused("aten::select " + whose + "along the divided dimension", [](const auto& w) { w[1]; });
  expect_refused("aten::view " + whose + "to sizes [4, 6], which may be of the part: use -1", [](const auto& w) {
    w.view({4, 6});
  });
  expect_refused("aten::normal_ " + whose + "which draws random numbers", [](const auto& w) {
    const at::NoGradGuard no_gradient;
    w.normal_();
  });
  expect_refused("aten::mul " + whose + "beside a tensor of the part's shape",
                 [](const auto& w) { w* at::ones_like(w); });
}

TEST(OtherOperators, OfOptimizersTakeParts) {
  const auto train = [](ReadingNetImpl& net) {
    torch::optim::SGD sgd(net.parameters(),
                          torch::optim::SGDOptions(0.1).weight_decay(0.1).momentum(0.9).nesterov(true));
    for (int i = 0; i < 3; ++i) {
      sgd.zero_grad();
      (net.layer(torch::linear(waves({3, 6}, i), net.below)).pow(2).sum()).backward();
      sgd.step();
    }
  };
  ReadingNet whole;
  train(*whole);
  collective::on_ranks(2, [&](const Group& group) {
    ReadingNet net;
    parallelize_module(net, {group, 30}, {{"layer", ColwiseParallel{.output = Replicate()}}});
    train(*net);
    EXPECT_TRUE(at::allclose(full_tensor(net->layer->weight), whole->layer->weight));
    EXPECT_TRUE(at::allclose(full_tensor(net->layer->bias), whole->layer->bias));
    EXPECT_TRUE(at::allclose(net->below, whole->below));
  });
}

// A token embedding whose weight is the head's, in the ways in which programs say so.
struct TiedNetImpl : torch::nn::Module {
  enum class Tie { linear, product, assigned };
  explicit TiedNetImpl(Tie how) : tie(how) {
    wte = register_module("wte", torch::nn::Embedding(8, 4));
    up = register_module("up", torch::nn::Linear(4, 4));
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(4, 8).bias(false)));
    to(at::kDouble);
    const at::NoGradGuard no_gradient;
    wte->weight.copy_(waves({8, 4}, 0.3));
    up->weight.copy_(waves({4, 4}, 0.5));
    up->bias.copy_(waves({4}, 0.6));
    if (tie == Tie::assigned) head->weight = wte->weight;
  }
  at::Tensor forward(const at::Tensor& ids) {
    const auto x = up(wte(ids));
    if (tie == Tie::linear) return torch::linear(x, wte->weight);
    return tie == Tie::product ? at::matmul(x, wte->weight.t()) : head(x);
  }
  const Tie tie;
  torch::nn::Embedding wte = nullptr;
  torch::nn::Linear up = nullptr, head = nullptr;
};
TORCH_MODULE(TiedNet);

TEST(TiedHeads, TrainAsOneProcess) {
  using Tie = TiedNetImpl::Tie;
  const auto ids = at::tensor({0, 5, 3, 7, 5, 1}, at::kLong).view({2, 3}),
             labels = at::tensor({5, 3, 7, 2, 2, 0}, at::kLong);
  const ParallelPlan whole_logits{{"wte", RowwiseParallel()}},
      of_features{{"wte", ColwiseParallel{.output = Replicate()}}},
      own_logits{{"wte", RowwiseParallel{.divided_logits = true}}},
      own_of_head{{"wte", RowwiseParallel()}, {"head", ColwiseParallel()}}, head_alone{{"head", ColwiseParallel()}};
  struct Case {
    Tie tie;
    const ParallelPlan* plan;
    bool divided;
  };
  for (const auto& each : {Case{Tie::linear, &whole_logits, false}, Case{Tie::product, &whole_logits, false},
                           Case{Tie::assigned, &whole_logits, false}, Case{Tie::linear, &of_features, false},
                           Case{Tie::assigned, &of_features, false}, Case{Tie::linear, &own_logits, true},
                           Case{Tie::product, &own_logits, true}, Case{Tie::assigned, &own_of_head, true},
                           Case{Tie::assigned, &head_alone, true}}) {
    SCOPED_TRACE(testing::Message() << static_cast<int>(each.tie) << " of " << each.plan->at(0).first << each.divided);
    TiedNet whole(each.tie);
    const auto expected = at::cross_entropy_loss(whole(ids).flatten(0, 1), labels);
    expected.backward();
    collective::on_ranks(2, [&](const Group& group) {
      const Communicator ranks(group, 30);
      TiedNet net(each.tie);
      parallelize_module(net, ranks, *each.plan);
      const auto logits = net(ids).flatten(0, 1);
      const auto loss = each.divided ? vocabulary_parallel_cross_entropy(logits, labels, ranks).mean()
                                     : at::cross_entropy_loss(logits, labels);
      loss.backward();
      EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-12);
      const auto division = division_of(net->wte->weight);
      EXPECT_TRUE(at::allclose(net->wte->weight.grad(), division->part_of(whole->wte->weight.grad())));
      EXPECT_TRUE(at::allclose(net->up->weight.grad(), whole->up->weight.grad()));
      EXPECT_TRUE(at::allclose(net->up->bias.grad(), whole->up->bias.grad()));
    });
  }
}

TEST(TiedHeads, WholeLogitsAreNotForTheDividedLoss) {
  collective::on_ranks(2, [&](const Group& group) {
    TiedNet net(TiedNetImpl::Tie::linear);
    parallelize_module(net, {group, 30}, {{"wte", RowwiseParallel()}});
    const auto ids = at::tensor({0, 5, 3}, at::kLong);
    expect_says(message_of<InvalidArgument>([&] {
                  vocabulary_parallel_cross_entropy(net(ids), ids, {group, 30});
                }),
                "the logits, of shape [3, 8], are the same on all 2 ranks, so they are whole");
  });
}

TEST(DividedEmbedding, RefusesIdsBelowZero) {
  collective::on_ranks(2, [&](const Group& group) {
    TiedNet net(TiedNetImpl::Tie::linear);
    parallelize_module(net, {group, 30}, {{"wte", RowwiseParallel()}});
    expect_says(message_of<InvalidArgument>([&] {
                  net(at::tensor({1, -1}, at::kLong));
                }),
                "RowwiseParallel wte: the id -1 is below 0");
  });
}

}  // namespace
}  // namespace lockstep::parallel
