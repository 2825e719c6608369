// A whole training: the step of several replicas as one program, whose weights stay on the devices.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/functional/pooling.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "ops/tensors.h"
#include "tpu/pjrt/executable.h"
#include "tpu/trace.h"

namespace lockstep::tpu {
namespace {

using Tensors = std::vector<at::Tensor>;

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const auto features =
        torch::nn::functional::max_pool2d(conv(x).relu(), torch::nn::functional::MaxPool2dFuncOptions(2));
    return head(hidden(features.flatten(1)).relu());
  }

  torch::nn::Conv2d conv = register_module("conv", torch::nn::Conv2d(1, 6, 3));
  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(6 * 5 * 5, 16)),
                    head = register_module("head", torch::nn::Linear(16, 4));
};
TORCH_MODULE(Net);

constexpr std::int64_t kBatch = 8;
constexpr int kSteps = 50;
constexpr double kRate = 1e-2, kBeta1 = 0.9, kBeta2 = 0.999, kEpsilon = 1e-8;

at::Tensor loss_of(Net& net, const at::Tensor& x, const at::Tensor& y) {
  return torch::nn::functional::cross_entropy(net(x), y);
}

struct Batch {
  at::Tensor x, y;
};
Batch batch_of(int step) {
  at::manual_seed(static_cast<std::uint64_t>(step));
  return {at::randn({kBatch, 1, 12, 12}), at::randint(4, {kBatch})};
}

// The program's arguments: x, y, the step's number, then the parameters, their first and their second moments; its
// results the same without x and y, then the loss.
std::string trace_step(Net& net, int replicas) {
  Trace trace;
  const auto x = trace.argument({kBatch / replicas, 1, 12, 12}, at::kFloat);
  const auto y = trace.argument({kBatch / replicas}, at::kLong);
  const auto step = trace.argument({}, at::kFloat) + 1;
  Tensors parameters, first, second, results{step};
  for (auto* const parameter : {&net->conv->weight, &net->conv->bias, &net->hidden->weight, &net->hidden->bias,
                                &net->head->weight, &net->head->bias}) {
    *parameter = trace.argument(parameter->sizes(), at::kFloat).requires_grad_();
    parameters.push_back(*parameter);
  }
  for (const auto& parameter : parameters) first.push_back(trace.argument(parameter.sizes(), at::kFloat));
  for (const auto& parameter : parameters) second.push_back(trace.argument(parameter.sizes(), at::kFloat));
  const auto loss = loss_of(net, x, y);
  loss.backward();
  const at::NoGradGuard no_gradient;
  const auto correction1 = 1 - at::pow(kBeta1, step), correction2 = 1 - at::pow(kBeta2, step);
  Tensors moments1, moments2;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto gradient = trace.all_reduce("stablehlo.add", {parameters[i].grad()}, replicas)[0] / replicas;
    moments1.push_back(first[i] * kBeta1 + gradient * (1 - kBeta1));
    moments2.push_back(second[i] * kBeta2 + gradient * gradient * (1 - kBeta2));
    const auto change = moments1[i] / correction1 / ((moments2[i] / correction2).sqrt() + kEpsilon);
    results.push_back(parameters[i].detach() - kRate * change);
  }
  results.insert(results.end(), moments1.begin(), moments1.end());
  results.insert(results.end(), moments2.begin(), moments2.end());
  results.push_back(trace.all_reduce("stablehlo.add", {loss.detach()}, replicas)[0] / replicas);
  std::vector<std::pair<int, int>> aliases;
  for (int i = 0; i + 1 < static_cast<int>(results.size()); ++i) aliases.emplace_back(i + 2, i);
  return trace.finish(results, aliases, replicas);
}

class Training : public testing::TestWithParam<int> {
 protected:
  static void SetUpTestSuite() { Trace before_the_first_backward; }
};

TEST_P(Training, IsThatOfLibTorch) {
  const int replicas = GetParam();
  at::manual_seed(5);
  Net net, plain;
  Tensors initial;
  for (const auto& parameter : plain->parameters()) initial.push_back(parameter.detach().clone());

  const auto client = pjrt::Client::create(pjrt::Plugin::load(CPU_PLUGIN), Deadline::after(std::chrono::seconds(60)),
                                           {{"cpu_device_count", std::int64_t{replicas}}});
  const auto executable = pjrt::Executable::compile(client, trace_step(net, replicas), {.replicas = replicas});
  const auto copy = [&](const at::Tensor& tensor, int replica) {
    const auto values = tensor.contiguous();
    return client->copy_to_device(values.const_data_ptr(), {ops::dtype_of(values.scalar_type()), values.sizes().vec()},
                                  executable.devices()[static_cast<std::size_t>(replica)]);
  };
  std::vector<std::vector<pjrt::Buffer>> state(static_cast<std::size_t>(replicas));
  for (int replica = 0; replica < replicas; ++replica) {
    auto& mine = state[static_cast<std::size_t>(replica)];
    mine.push_back(copy(at::zeros({}), replica));
    for (const auto& value : initial) mine.push_back(copy(value, replica));
    for (int moment = 0; moment < 2; ++moment)
      for (const auto& value : initial) mine.push_back(copy(at::zeros_like(value), replica));
  }

  torch::optim::Adam adam(plain->parameters(), torch::optim::AdamOptions(kRate));
  const auto in_a_minute = Deadline::after(std::chrono::seconds(60));
  for (int step = 0; step < kSteps; ++step) {
    const auto batch = batch_of(step);
    adam.zero_grad();
    const auto expected = loss_of(plain, batch.x, batch.y);
    expected.backward();
    adam.step();

    std::vector<std::vector<pjrt::Buffer>> data;
    std::vector<std::vector<const pjrt::Buffer*>> arguments;
    for (int replica = 0; replica < replicas; ++replica) {
      auto& mine = data.emplace_back();
      mine.push_back(copy(batch.x.chunk(replicas)[static_cast<std::size_t>(replica)], replica));
      mine.push_back(copy(batch.y.chunk(replicas)[static_cast<std::size_t>(replica)], replica));
      auto& list = arguments.emplace_back();
      for (const auto& buffer : mine) list.push_back(&buffer);
      for (const auto& buffer : state[static_cast<std::size_t>(replica)]) list.push_back(&buffer);
    }
    state = executable.run(arguments).outputs;
    float loss = 0;
    for (auto& mine : state) {
      mine.back().copy_to_host(&loss, sizeof(loss), in_a_minute);
      EXPECT_NEAR(loss, expected.item<float>(), 1e-5) << "step " << step;
      mine.pop_back();
    }
  }
  for (const auto& mine : state) {
    for (std::size_t i = 0; i < initial.size(); ++i) {
      auto value = at::empty_like(initial[i]);
      mine[i + 1].copy_to_host(value.mutable_data_ptr(), value.nbytes(), in_a_minute);
      EXPECT_LT((value - plain->parameters()[i]).abs().max().item<float>(), 1e-5) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Replicas, Training, testing::Values(1, 2, 4));

}  // namespace
}  // namespace lockstep::tpu
