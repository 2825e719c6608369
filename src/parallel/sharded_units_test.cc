// Tests uses of parameters that fully_shard divided other than calls of layers.
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <functional>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "collective/ranks_testing.h"
#include "lockstep/parallel.h"

namespace lockstep::parallel {
namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (const char* name : {"first", "second"}) {
      torch::nn::Linear layer(6, 6);
      const at::NoGradGuard no_gradient;
      layer->weight.copy_(at::sin(at::arange(36).view({6, 6})) * 0.4);
      layer->bias.copy_(at::cos(at::arange(6)) * 0.1);
      layers.push_back(register_module(name, layer));
    }
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return compute(layers, x); }

  std::vector<torch::nn::Linear> layers;
  std::function<at::Tensor(std::vector<torch::nn::Linear>&, const at::Tensor&)> compute = [](auto& own, const auto& x) {
    return own[1](at::tanh(own[0](x)));
  };
};
TORCH_MODULE(Net);

at::Tensor examples() { return at::cos(at::arange(24, at::kDouble).view({4, 6})); }

// Two steps of SGD on two ranks, a unit for each layer, against one process.
void expect_as_whole_net(const decltype(NetImpl::compute)& compute, double tolerance = 1e-10) {
  Net whole;
  whole->compute = compute;
  torch::optim::SGD sgd(whole->parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < 2; ++step) {
    sgd.zero_grad();
    whole(examples()).pow(2).mean().backward();
    sgd.step();
  }
  collective::on_ranks(2, [&](const Group& group) {
    Net net;
    net->compute = compute;
    auto sharded = fully_shard(net, {group, 30}, {.units = {"first", "second"}});
    torch::optim::SGD own_sgd(sharded.parameters(), torch::optim::SGDOptions(0.1));
    for (int step = 0; step < 2; ++step) {
      own_sgd.zero_grad();
      sharded(examples().chunk(2)[static_cast<std::size_t>(group.rank())]).pow(2).mean().backward();
      own_sgd.step();
    }
    for (const auto& [name, value] : sharded.gather()) {
      EXPECT_TRUE(at::allclose(value, whole->named_parameters()[name], tolerance, tolerance)) << name;
    }
  });
}

TEST(ShardedUnits, AnOperatorMayReadSeveralUnits) {
  expect_as_whole_net([](auto& layers, const at::Tensor& x) {
    const auto weights = at::cat({layers[0]->weight, layers[1]->weight});
    return torch::linear(x, weights) +
           at::cat({layers[0]->bias, layers[1]->bias}) * (layers[0]->bias - layers[1]->bias).sum();
  });
}

TEST(ShardedUnits, OperatorsThatMayCopyReadValues) {
  expect_as_whole_net(
      [](auto& layers, const at::Tensor& x) {
        const auto weight =
            layers[0]->weight.t().contiguous().reshape({36}).to(at::kFloat).to(at::kDouble).view({6, 6});
        return layers[1](x.matmul(weight)) + layers[0]->bias.clone();
      },
      1e-6);
}

TEST(ShardedUnits, DetachedWeightsGetNoGradient) {
  expect_as_whole_net([](auto& layers, const at::Tensor& x) {
    return torch::linear(layers[0](x), layers[0]->weight.detach()) + layers[1](x).detach();
  });
}

TEST(ShardedUnits, UsesInAnyOrder) {
  expect_as_whole_net([](auto& layers, const at::Tensor& x) {
    return layers[0](layers[1](at::tanh(layers[0](at::tanh(layers[1](x))))));
  });
}

TEST(ShardedUnits, ARankMayHaveNoExamples) {
  Net whole;
  whole(examples()).pow(2).mean().backward();
  collective::on_ranks(2, [&](const Group& group) {
    Net net;
    auto sharded = fully_shard(net, {group, 30}, {.units = {"first"}});
    sharded(examples().narrow(0, 0, group.rank() == 0 ? 4 : 0)).pow(2).mean().backward();  // NaN on rank 1
    double squares = 0, expected = 0;
    for (const auto& shard : sharded.parameters()) squares += shard.grad().pow(2).sum().item<double>();
    Communicator(group).sum({&squares, 1});
    for (const auto& parameter : whole->parameters()) expected += parameter.grad().pow(2).sum().item<double>();
    EXPECT_NEAR(squares, expected, 1e-12);
  });
}

TEST(ShardedUnits, TrainsOnAfterAnExceptionInBackward) {
  Net whole;
  whole(examples()).pow(2).mean().backward();
  collective::on_ranks(2, [&](const Group& group) {
    Net net;
    auto sharded = fully_shard(net, {group, 30}, {.units = {"first", "second"}});
    auto x = examples().requires_grad_();
    x.register_hook([](const at::Tensor&) -> at::Tensor { throw Error("a bad batch"); });
    expect_says(message_of([&] { sharded(x).sum().backward(); }), "a bad batch");
    for (const auto& shard : sharded.parameters()) EXPECT_FALSE(shard.grad().defined());
    sharded(examples()).pow(2).mean().backward();
    double squares = 0, expected = 0;
    for (const auto& shard : sharded.parameters()) squares += shard.grad().pow(2).sum().item<double>();
    Communicator(group).sum({&squares, 1});
    for (const auto& parameter : whole->parameters()) expected += parameter.grad().pow(2).sum().item<double>();
    EXPECT_NEAR(squares, expected, 1e-12);
  });
}

TEST(ShardedUnits, EvaluationDoesNotCountExamples) {
  collective::on_ranks(2, [&](const Group& group) {
    std::vector<std::vector<at::Tensor>> gradients;
    for (const bool evaluates : {false, true}) {
      Net net;
      auto sharded = fully_shard(net, {group, 30}, {.units = {"first"}});
      const at::Tensor part = examples().chunk(2)[static_cast<std::size_t>(group.rank())];
      if (evaluates) {
        const at::NoGradGuard no_gradient;
        sharded(examples().narrow(0, 0, group.rank() + 1));
      }
      sharded(part).pow(2).mean().backward();
      gradients.emplace_back();
      for (const auto& shard : sharded.parameters()) gradients.back().push_back(shard.grad().clone());
    }
    for (std::size_t i = 0; i < gradients[0].size(); ++i) EXPECT_TRUE(gradients[0][i].equal(gradients[1][i]));
  });
}

TEST(ShardedUnits, GradientsOfSeveralBackwardsAddUp) {
  collective::on_ranks(2, [&](const Group& group) {
    Net net;
    auto sharded = fully_shard(net, {group, 30}, {.units = {"first"}});
    std::vector<at::Tensor> once;
    for (int i = 0; i < 3; ++i) {
      sharded(examples()).pow(2).mean().backward();
      if (i > 0) continue;
      for (const auto& shard : sharded.parameters()) once.push_back(shard.grad().clone());
    }
    for (std::size_t i = 0; i < once.size(); ++i)
      EXPECT_TRUE(at::allclose(sharded.parameters()[i].grad(), 3 * once[i]));
  });
}

TEST(ShardedUnits, ValuesAreSavedAndLoaded) {
  std::map<std::string, at::Tensor> saved;
  collective::on_ranks(2, [&](const Group& group) {
    Net net;
    auto sharded = fully_shard(net, {group, 30}, {.units = {"first"}});
    auto values = sharded.gather();
    EXPECT_EQ(values.size(), group.rank() == 0 ? 4U : 0U);
    for (auto& [name, value] : values) value.mul_(2);
    sharded.load(values);
    if (group.rank() == 0) saved = values;
    const auto doubled = sharded.gather();
    for (const auto& [name, value] : doubled) EXPECT_TRUE(value.equal(values.at(name)));
    values.erase("first.bias");
    expect_says(message_of<InvalidArgument>([&] { sharded.load(values); }), "there is no \"first.bias\"");
  });
  collective::on_ranks(3, [&](const Group& group) {  // another number of ranks
    Net net;
    auto sharded = fully_shard(net, {group, 30}, {.units = {"second"}});
    sharded.load(saved);
    Net whole;
    const at::NoGradGuard no_gradient;
    for (auto& each : whole->named_parameters()) each.value().mul_(2);
    EXPECT_TRUE(at::allclose(sharded(examples()), whole(examples())));
  });
}

TEST(ShardedUnits, RefusesWhatItCannotDo) {
  collective::on_ranks(2, [&](const Group& group) {
    Net net;
    expect_says(message_of<InvalidArgument>([&] {
                  fully_shard(net, group, {.units = {"first", "secnd"}});
                }),
                "no module is called \"secnd\"; did you mean second?");
    EXPECT_TRUE(net(examples()).defined());  // it was left as it was
    FullyShardedParameters sharded({group, 30});
    sharded.add(*net->layers[0]);
    expect_says(message_of<InvalidArgument>([&] { sharded.add(*net->layers[1]); }),
                "there is a parameter \"weight\" already");
    expect_says(message_of<InvalidArgument>([&] {
                  parallelize_module(net, group, {{"first", ColwiseParallel()}});
                }),
                "divide before fully_shard");
    expect_says(message_of<InvalidArgument>([&] { fully_shard(net, group); }), "first.weight is divided already");
    expect_says(message_of<InvalidArgument>([&] { average_gradients(sharded.parameters(), group); }),
                "means over these ranks already");
    expect_says(message_of<InvalidArgument>([&] { clip_grad_norm(sharded.parameters(), 1); }),
                "use FullyShardedParameters::clip_grad_norm");
    expect_says(message_of([&] { net->to(at::kFloat); }), "before it is divided");
    const at::NoGradGuard no_gradient;
    expect_says(message_of([&] { net->layers[0]->weight.zero_(); }),
                "would change a parameter that fully_shard divided");
  });
}

// Ragged parts, of 3 and 1 examples.
at::Tensor ragged_part(int rank) { return examples().slice(0, rank == 0 ? 0 : 3, rank == 0 ? 3 : 4); }

double squares_of(const std::vector<at::Tensor>& parameters) {
  double sum = 0;
  for (const auto& parameter : parameters) {
    if (parameter.grad().defined()) sum += parameter.grad().pow(2).sum().item<double>();
  }
  return sum;
}

// So it is in eval(), after a forward whose result is thrown away, and with inputs in a tuple.
TEST(ShardedUnits, BackwardsCountTheExamplesOfTheForwardsTheyGoThrough) {
  Net whole;
  whole(examples()).pow(2).mean().backward();
  const auto expected = squares_of(whole->parameters());
  collective::on_ranks(2, [&](const Group& group) {
    Net net;
    auto sharded = fully_shard(net, {group, 30}, {.units = {"first", "second"}});
    const auto check = [&](const at::Tensor& loss) {
      for (const auto& shard : sharded.parameters()) shard.mutable_grad().reset();
      loss.backward();
      double squares = squares_of(sharded.parameters());
      Communicator(group, 30).sum({&squares, 1});
      EXPECT_NEAR(squares, expected, 1e-10 * expected);
    };
    const auto x = ragged_part(group.rank());
    check(sharded(x).pow(2).mean());
    net->eval();
    check(sharded(x).pow(2).mean());
    const auto unused = sharded(examples()).sum();
    check(sharded.forward(x).pow(2).mean());
    expect_says(message_of<InvalidArgument>([&] { sharded->forward(x).pow(2).mean().backward(); }),
                "call sharded(x) instead of sharded->forward(x)");
    sharded.add_examples(static_cast<double>(x.size(0)));
    sharded.release();
    check(sharded->forward(x).pow(2).mean());
  });
}

// An operator changes the shards after the values were gathered.
TEST(ShardedUnits, OldValuesAreRefused) {
  collective::on_ranks(2, [&](const Group& group) {
    Net net;
    auto sharded = fully_shard(net, {group, 30});
    sharded(examples()).pow(2).mean().backward();
    const at::NoGradGuard no_gradient;
    const auto before = sharded->forward(examples());
    EXPECT_TRUE(at::equal(sharded->forward(examples()), before));
    for (const auto& shard : sharded.parameters()) shard.mul_(0.5);
    expect_says(message_of([&] { sharded->forward(examples()); }),
                "have changed since its values were gathered, which are old: call what fully_shard returned");
    EXPECT_FALSE(at::equal(sharded(examples()), before));
  });
}

// The units have equal sizes: mixed, ranks would compute with each other's parameters.
TEST(ShardedUnits, RanksInAnotherUnitAreToldWhich) {
  const auto errors = collective::run_ranks({.group = {.backend = "threads"}}, [](const Group& group) {
    Net net;
    net->compute = [&](auto& layers, const auto& x) { return layers[static_cast<std::size_t>(group.rank())](x); };
    auto sharded = fully_shard(net, {group, 30}, {.units = {"first", "second"}});
    const at::NoGradGuard no_gradient;
    sharded(examples());
  });
  const auto said = message_of([&] { std::rethrow_exception(errors[0]); });
  expect_says(said, "for gathering unit \"first\" (first.weight) of fully_shard 1, rank 1 calls");
  expect_says(said, "for gathering unit \"second\" (second.weight) of fully_shard 1");
}

TEST(ShardedUnits, TrainsSparseEmbeddingsAsOneProcess) {
  const auto make = [] {
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(8, 3).sparse(true));
    const at::NoGradGuard no_gradient;
    embedding->weight.copy_(at::sin(at::arange(24).view({8, 3})));
    return embedding;
  };
  const auto ids = at::tensor({1, 5, 5, 2}, at::kLong);
  auto whole = make();
  whole(ids).pow(2).mean().backward();
  collective::on_ranks(2, [&](const Group& group) {
    auto embedding = make();
    auto sharded = fully_shard(embedding, {group, 30});
    torch::optim::SGD sgd(sharded.parameters(), torch::optim::SGDOptions(1));
    sharded(ids.chunk(2)[static_cast<std::size_t>(group.rank())]).pow(2).mean().backward();
    sgd.step();
    for (const auto& [name, value] : sharded.gather())  // rank 0 has them
      EXPECT_TRUE(at::allclose(value, whole->weight - whole->weight.grad().to_dense())) << name;
  });
}

// Three steps; `change` is called before the second and the third one.
using ChangeTraining = std::function<void(NetImpl& net, int step, const std::vector<at::Tensor>& shards)>;

void step_with(Net& net, torch::optim::SGD& sgd, const std::function<at::Tensor()>& forward,
               const std::vector<at::Tensor>& shards, const ChangeTraining& change) {
  for (int step = 0; step < 3; ++step) {
    if (step > 0) change(*net, step, shards);
    sgd.zero_grad();
    forward().pow(2).mean().backward();
    sgd.step();
  }
}

TEST(ShardedUnits, FreezeAndTrainAgainAsInOneProcess) {
  const ChangeTraining freeze_one = [](NetImpl& net, int step, const auto&) {
    net.layers[0]->weight.set_requires_grad(step == 2);
  };
  const ChangeTraining freeze_shards = [](NetImpl& net, int step, const auto& shards) {
    if (shards.empty()) {
      for (const auto& parameter : net.parameters()) parameter.set_requires_grad(step == 2);
      net.layers[1]->bias.set_requires_grad(true);
    }
    for (std::size_t i = 0; i + 1 < shards.size(); ++i) shards[i].set_requires_grad(step == 2);
  };
  for (const auto& change : {freeze_one, freeze_shards}) {
    Net whole;
    torch::optim::SGD whole_sgd(whole->parameters(), torch::optim::SGDOptions(0.1));
    step_with(
        whole, whole_sgd, [&] { return whole(examples()); }, {}, change);
    collective::on_ranks(1, [&](const Group& group) {
      Net net;
      auto sharded = fully_shard(net, {group, 30}, {.units = {"first", "second"}});
      torch::optim::SGD sgd(sharded.parameters(), torch::optim::SGDOptions(0.1));
      step_with(
          net, sgd, [&] { return sharded(examples()); }, sharded.parameters(), change);
      for (const auto& [name, value] : sharded.gather()) {
        EXPECT_TRUE(at::allclose(value, whole->named_parameters()[name], 1e-10, 1e-10)) << name;
      }
    });
  }
}

TEST(ShardedUnits, RefusesToTrainWhatWasFrozen) {
  collective::on_ranks(2, [&](const Group& group) {
    Net net;
    for (const auto& parameter : net->layers[0]->parameters()) parameter.set_requires_grad(false);
    auto sharded = fully_shard(net, {group, 30}, {.units = {"first", "second"}});
    EXPECT_TRUE(sharded(examples()).defined());
    net->layers[0]->bias.set_requires_grad(true);
    expect_says(message_of<InvalidArgument>([&] { sharded(examples()); }),
                "first.bias was frozen when it was divided, and is to be trained now");
  });
}

// A pipeline's step has several backwards: those whose examples nobody told would count all ranks alike.
TEST(ShardedUnits, ExamplesAreToldForEachBackwardOrNone) {
  collective::on_ranks(2, [&](const Group& group) {
    Net net;
    FullyShardedParameters sharded({group, 30});
    sharded.add(*net);
    const auto x = ragged_part(group.rank());
    sharded.add_examples(static_cast<double>(x.size(0)));
    net(x).pow(2).mean().backward();
    sharded.release();
    const auto y = net(x).pow(2).mean();
    expect_says(message_of<InvalidArgument>([&] { y.backward(); }),
                "the number of examples of this backward is not known, since sharded.add_examples was called before");
  });
}

TEST(ShardedUnits, RefusesSchedulesThatSplitBackward) {
  collective::on_ranks(1, [&](const Group& group) {
    Net net;
    Pipeline pipeline({[&] { return net; }}, group, {.schedule = schedules::zero_bubble, .microbatches = 2});
    FullyShardedParameters sharded({group, 30});
    sharded.add(*net);
    expect_says(message_of([&] {
                  pipeline.step(examples(), examples(),
                                [](const auto& y, const auto& target) { return (y - target).pow(2).mean(); });
                }),
                "use a schedule that does not split it");
  });
}

}  // namespace
}  // namespace lockstep::parallel
