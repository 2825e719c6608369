// DiLoCo against a plain loop of its published formula over as many copies of the model, in double precision.
#include "lockstep/ddp/diloco.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/gradient/tensor_collectives.h"

namespace lockstep::ddp {
namespace {

using at::Tensor;

constexpr int kTotal = 23;

struct Mlp : torch::nn::Module {
  explicit Mlp(at::ScalarType dtype) {
    first = register_module("first", torch::nn::Linear(5, 40));
    second = register_module("second", torch::nn::Linear(40, 3));
    frozen = register_parameter("frozen", at::ones({40}), false);
    to(dtype);
    const at::NoGradGuard no_grad;
    auto generator = at::detail::createCPUGenerator(1);  // LibTorch's own is shared by the ranks' threads
    for (auto& parameter : parameters()) {
      if (parameter.requires_grad()) parameter.copy_(at::randn(parameter.sizes(), generator, at::kDouble) * 0.4);
    }
  }
  Tensor forward(const Tensor& x) { return second(at::tanh(first(x)) * frozen); }
  torch::nn::Linear first = nullptr, second = nullptr;
  Tensor frozen;
};

// One copy that trains on the examples of `rank`.
struct Trainee {
  explicit Trainee(at::ScalarType dtype = at::kDouble)
      : net(std::make_shared<Mlp>(dtype)), adam(net->parameters(), torch::optim::AdamOptions(1e-2)) {}

  void step(int rank, int number) {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(1000 * rank + number));
    const auto x = at::randn({6, 5}, generator, net->frozen.options());
    const auto y = x.narrow(1, 0, 3).sin() * (rank + 1);
    adam.zero_grad();
    at::mse_loss(net->forward(x), y).backward();
    adam.step();
  }
  std::vector<Tensor> trained() const {
    std::vector<Tensor> all;
    for (const auto& parameter : net->parameters()) {
      if (parameter.requires_grad()) all.push_back(parameter.detach());
    }
    return all;
  }
  Tensor values() const {
    std::vector<Tensor> flat;
    for (const auto& parameter : trained()) flat.push_back(parameter.flatten());
    return at::cat(flat);
  }

  std::shared_ptr<Mlp> net;
  torch::optim::Adam adam;
};

// As OuterStep divides them: in order, about equally many elements each.
std::vector<std::vector<std::size_t>> parts_of(const std::vector<Tensor>& parameters, int parts) {
  std::int64_t all = 0, before = 0;
  for (const auto& parameter : parameters) all += parameter.numel();
  std::vector<std::vector<std::size_t>> divided(static_cast<std::size_t>(parts));
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    divided[static_cast<std::size_t>(before * parts / all)].push_back(i);
    before += parameters[i].numel();
  }
  return divided;
}

// The formula, one parameter after the other.
std::vector<Tensor> plain_loop(int ranks, const DiLoCoOptions& options) {
  std::vector<Trainee> all(static_cast<std::size_t>(ranks));
  std::vector<Tensor> anchors, velocities, deltas;
  for (const auto& parameter : all[0].trained()) {
    anchors.push_back(parameter.clone());
    velocities.push_back(at::zeros_like(parameter));
  }
  deltas.resize(anchors.size());
  const auto begin = [&](std::size_t i) {
    deltas[i] = at::zeros_like(anchors[i]);
    for (const auto& each : all) deltas[i] += (anchors[i] - each.trained()[i]) / ranks;
  };
  const auto end = [&](std::size_t i, double mixing) {
    velocities[i] = options.momentum * velocities[i] + deltas[i];
    anchors[i] = anchors[i] - options.learning_rate * (deltas[i] + options.momentum * velocities[i]);
    for (const auto& each : all) each.trained()[i].copy_(mixing * each.trained()[i] + (1 - mixing) * anchors[i]);
  };
  const auto parts = parts_of(anchors, options.parts);
  for (int number = 1; number <= kTotal; ++number) {
    for (int rank = 0; rank < ranks; ++rank) all[static_cast<std::size_t>(rank)].step(rank, number);
    for (int part = 0; part < options.parts; ++part) {
      const auto due = options.steps * (part + 1) / options.parts;
      for (const auto i : parts[static_cast<std::size_t>(part)]) {
        if (number >= due && (number - due) % options.steps == 0) begin(i);
        const auto begun = number - options.overlap;
        if (begun >= due && (begun - due) % options.steps == 0) end(i, options.overlap > 0 ? options.mixing : 0);
      }
    }
  }
  std::vector<Tensor> values;
  for (const auto& each : all) values.push_back(each.values());
  return values;
}

TEST(DiLoCo, IsThePublishedFormula) {
  const std::vector<DiLoCoOptions> kinds{local_sgd(4),
                                         local_sgd(1),
                                         {.steps = 5},
                                         {.steps = 6, .learning_rate = 0.5, .momentum = 0.8, .parts = 2},
                                         {.steps = 6, .parts = 3, .overlap = 1},
                                         {.steps = 7, .overlap = 3, .mixing = 0.25}};
  for (const auto& options : kinds) {
    for (int ranks = 1; ranks <= 3; ++ranks) {
      const auto expected = plain_loop(ranks, options);
      collective::on_ranks(ranks, [&](const Group& group) {
        Trainee trainee;
        if (group.rank() > 0) trainee.net->first->bias.detach().add_(1);  // rank 0's values are everybody's
        DiLoCo diloco(trainee.net->named_parameters(), group, options);
        for (int number = 1; number <= kTotal; ++number) {
          trainee.step(group.rank(), number);
          EXPECT_EQ(diloco.step(), options.parts == 1 && options.overlap == 0 && number % options.steps == 0);
        }
        EXPECT_EQ(diloco.steps(), kTotal);
        const auto& right = expected[static_cast<std::size_t>(group.rank())];
        EXPECT_LT((trainee.values() - right).abs().max().item<double>(), 1e-12);
      });
    }
  }
}

TEST(DiLoCo, AMeetingAtAnyTimeLeavesAllWithTheSameBits) {
  constexpr int kRanks = 3;
  for (const auto dtype : {std::optional<DType>(), std::optional(DType::bfloat16), std::optional(DType::int8)}) {
    std::vector<Tensor> values(kRanks), exact(kRanks);
    for (auto* const into : {&values, &exact}) {
      collective::on_ranks(kRanks, [&](const Group& group) {
        Trainee trainee(at::kFloat);
        DiLoCoOptions options{.steps = 4, .parts = 2, .overlap = 1};
        if (into == &values) options.dtype = dtype;
        DiLoCo diloco(trainee.net->named_parameters(), group, options);
        for (int number = 1; number <= 13; ++number) {
          trainee.step(group.rank(), number);
          diloco.step();
        }
        diloco.meet();
        (*into)[static_cast<std::size_t>(group.rank())] = trainee.values().clone();
      });
    }
    for (const auto& each : values) EXPECT_TRUE(at::equal(each, values[0]));
    const auto way = (exact[0] - Trainee(at::kFloat).values()).norm();
    EXPECT_LE(((values[0] - exact[0]).norm() / way).item<double>(), dtype ? 0.02 : 0);
  }
}

// Groups of two ranks that sum gradients in each step; one of each group meets those of the others.
TEST(DiLoCo, GroupsThatAreSynchronousInsideMeet) {
  collective::on_ranks(4, [&](const Group& group) {
    const auto soon = Deadline::after(std::chrono::seconds(60));
    const auto inner = group.split(group.rank() / 2, 0, soon), outer = group.split(group.rank() % 2, 0, soon);
    Trainee trainee;
    DistributedDataParallel ddp(trainee.net, *inner);
    DiLoCo diloco(trainee.net->named_parameters(), *outer, {.steps = 3});
    for (int number = 1; number <= 9; ++number) {
      auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 * group.rank() + number));
      const auto x = at::randn({4, 5}, generator, at::kDouble);
      trainee.adam.zero_grad();
      at::mse_loss(ddp(x), x.narrow(1, 0, 3)).backward();
      trainee.adam.step();
      const bool met = diloco.step();
      auto first = trainee.values().clone();
      broadcast(group, first, 0, soon);
      EXPECT_EQ(at::equal(first, trainee.values()), met || group.rank() < 2);
    }
  });
}

TEST(DiLoCo, ARestoredTrainingHasTheSameBits) {
  constexpr int kRanks = 2;
  for (const auto dtype : {std::optional<DType>(), std::optional(DType::int8)}) {
    Archive archive;
    std::vector<Tensor> values(kRanks), again(kRanks);
    const auto run = [&](const Group& group, int from, std::vector<Tensor>& into) {
      Trainee trainee(at::kFloat);
      DiLoCo diloco(trainee.net->named_parameters(), group, {.steps = 3, .dtype = dtype});
      if (from > 0) diloco.trackable().load(archive, "outer")();
      EXPECT_EQ(diloco.steps(), from);
      for (int number = from + 1; number <= 9; ++number) {
        if (number == 7) trainee.adam.state().clear();  // which is the program's to keep
        trainee.step(group.rank(), number);
        if (!diloco.step() || number != 6 || from > 0) continue;
        Archive mine;
        diloco.trackable().save(mine, "outer");
        if (group.rank() == 0) archive = mine;
        group.barrier(Deadline::after(std::chrono::seconds(60)));
      }
      into[static_cast<std::size_t>(group.rank())] = trainee.values().clone();
    };
    collective::on_ranks(kRanks, [&](const Group& group) { run(group, 0, values); });
    collective::on_ranks(kRanks, [&](const Group& group) { run(group, 6, again); });
    for (int rank = 0; rank < kRanks; ++rank)
      EXPECT_TRUE(at::equal(again[static_cast<std::size_t>(rank)], values[static_cast<std::size_t>(rank)]));
  }
}

TEST(DiLoCo, OptionsOutOfTheirRangeAreNamed) {
  const auto says = [](const DiLoCoOptions& options) {
    const Trainee trainee;
    return message_of<InvalidArgument>(
        [&] { DiLoCo(trainee.net->named_parameters(), make_thread_groups(1)[0], options); });
  };
  expect_says(says({.steps = 0}), "DiLoCo: steps is 0; it must be 1 or more");
  expect_says(says({.learning_rate = 0}), "learning_rate is 0");
  expect_says(says({.momentum = 1}), "momentum is 1");
  expect_says(says({.dtype = DType::float16}), "dtype is float16; it must be bfloat16 or int8");
  expect_says(says({.steps = 4, .parts = 5}), "parts is 5");
  expect_says(says({.steps = 4, .parts = 2, .overlap = 2}), "overlap is 2");
  expect_says(says({.mixing = 1}), "mixing is 1");
}

TEST(DiLoCo, RanksThatDifferAreTold) {
  const auto groups = make_thread_groups(2);
  std::vector<std::jthread> threads;
  for (const auto& group : groups) {
    threads.emplace_back([group] {
      const Trainee trainee;
      expect_says(message_of<InvalidArgument>(
                      [&] { DiLoCo(trainee.net->named_parameters(), group, {.steps = 5 + group.rank()}); }),
                  "rank 0 has steps 5, rank 1 has steps 6");
    });
  }
}

TEST(DiLoCo, TakesATiedParameterOnce) {
  Trainee trainee;
  trainee.net->register_parameter("again", trainee.net->first->weight);
  DiLoCo diloco(trainee.net->named_parameters(), make_thread_groups(1)[0], local_sgd(1));
  trainee.step(0, 0);
  const auto values = trainee.values().clone();
  EXPECT_TRUE(diloco.step());
  EXPECT_LT((trainee.values() - values).abs().max().item<double>(), 1e-12);
}

TEST(DiLoCo, SavingBetweenMeetingsAndChangesOfTheTrainedAreRefused) {
  Trainee trainee;
  DiLoCo diloco(trainee.net->named_parameters(), make_thread_groups(1)[0], {.steps = 2});
  diloco.step();
  Archive archive;
  expect_says(message_of<InvalidArgument>([&] { diloco.trackable().save(archive, ""); }),
              "the next meeting is in 1 steps; meet()");
  trainee.net->frozen.set_requires_grad(true);
  expect_says(message_of<InvalidArgument>([&] { diloco.step(); }), "\"frozen\" was frozen when this was made");
}

}  // namespace
}  // namespace lockstep::ddp
