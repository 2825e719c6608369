// DistributedDataParallel averages the parameters that it should, and ranks in two wrappers are told apart. Ranks are
// threads.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "base/expect_says_testing.h"
#include "collective/ranks_testing.h"
#include "lockstep/ddp/distributed_data_parallel.h"

namespace lockstep::ddp {
namespace {

using at::Tensor;

struct Two : torch::nn::Module {
  Two() {
    a = register_module("a", torch::nn::Linear(4, 4));
    b = register_module("b", torch::nn::Linear(4, 4));
  }
  Tensor forward(const Tensor& x) {
    const auto y = b(a(x));
    return c.is_empty() ? y : c(y);
  }
  torch::nn::Linear a = nullptr, b = nullptr, c = nullptr;
};

// The errors that the ranks threw, one after the other.
std::string said_on_ranks(const std::function<void(const Group&)>& body) {
  std::string said;
  for (const auto& error : collective::run_ranks({.group = {.backend = "threads"}}, body))
    said += message_of([&] {
              if (error) std::rethrow_exception(error);
            }) +
            "\n";
  return said;
}

TEST(DdpParameters, RanksThatFreezeOthersAreToldWhich) {
  const auto said = said_on_ranks([](const Group& group) {
    auto net = std::make_shared<Two>();
    (group.rank() == 0 ? net->a : net->b)->weight.set_requires_grad(false);
    DistributedDataParallel ddp(net, group);
  });
  expect_says(said, "rank 0 has \"a.weight\" Float [4, 4], which requires no gradient, rank 1 has \"a.weight\"");
}

// The parameter is frozen while the module is wrapped.
TEST(DdpParameters, OneThatRequiresAGradientLaterIsRefused) {
  const auto said = said_on_ranks([](const Group& group) {
    auto net = std::make_shared<Two>();
    net->a->weight.set_requires_grad(false);
    DistributedDataParallel ddp(net, group);
    ddp(at::ones({2, 4})).mean().backward();
    net->a->weight.set_requires_grad(true);
    ddp(at::ones({2, 4})).mean().backward();
  });
  expect_says(said, "the parameter \"a.weight\" requires a gradient, which it did not");
  expect_says(said, "wrap the module anew");
}

TEST(DdpParameters, OneOfALayerThatCameLaterIsRefused) {
  for (const bool all_others_frozen : {false, true}) {
    const auto said = said_on_ranks([&](const Group& group) {
      auto net = std::make_shared<Two>();
      DistributedDataParallel ddp(net, group, {.weigh_by_examples = all_others_frozen});
      ddp(at::ones({2, 4})).mean().backward();
      net->c = net->register_module("c", torch::nn::Linear(4, 4));
      for (const auto& parameter : ddp.trained_parameters()) parameter.set_requires_grad(!all_others_frozen);
      ddp(at::ones({2, 4})).mean().backward();
    });
    expect_says(said, "the parameter \"c.weight\" requires a gradient");
  }
}

// Each wrapper would reduce the parameter's gradients, which would be summed twice.
TEST(DdpParameters, OneThatTwoWrappersHaveIsRefused) {
  const auto said = said_on_ranks([](const Group& group) {
    struct Shares : torch::nn::Module {
      explicit Shares(const Tensor& weight) : own(register_parameter("own", weight)) {}
      Tensor forward(const Tensor& x) { return x.matmul(own); }
      const Tensor own;
    };
    const auto weight = at::ones({4, 4}).set_requires_grad(true);
    DistributedDataParallel ddp(std::make_shared<Shares>(weight), group);
    DistributedDataParallel second(std::make_shared<Shares>(weight), group);
    second(at::ones({2, 4})).sum().backward();
    ddp(at::ones({2, 4}));
  });
  expect_says(said, "the gradients of the parameter \"own\" are taken by another DistributedDataParallel");
}

// The parameters of another module, which is trained too, are not this one's.
TEST(DdpParameters, ThoseOfOtherModulesInTheGraphAreNoneOfItsOwn) {
  collective::expect_no_errors(collective::run_ranks({.group = {.backend = "threads"}}, [](const Group& group) {
    auto net = std::make_shared<Two>(), head = std::make_shared<Two>();
    DistributedDataParallel ddp(net, group);
    for (int step = 0; step < 3; ++step) {
      const auto y = ddp(at::ones({2, 4}));
      (step == 1 ? head->forward(y) : y).mean().backward();
    }
  }));
}

// The modules' sizes are equal, and so are the kinds of all calls.
TEST(DdpParameters, RanksThatUseTwoModulesInOtherOrdersAreTold) {
  const auto said = said_on_ranks([](const Group& group) {
    auto one = std::make_shared<Two>(), two = std::make_shared<Two>();
    DistributedDataParallel first(one, group, {.timeout_seconds = 20}), second(two, group, {.timeout_seconds = 20});
    const auto x = at::ones({2, 4});
    (group.rank() == 0 ? first(x) : second(x)).mean().backward();
  });
  expect_says(said, "the ranks' calls differ: rank 0 calls");
  expect_says(said, "of DistributedDataParallel 1, rank 1 calls");
  expect_says(said, "of DistributedDataParallel 2");
}

}  // namespace
}  // namespace lockstep::ddp
