// For tests of lowerings: functions of tensors, and their gradients, as compiled programs against LibTorch's own.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "ops/tensors.h"
#include "tpu/call.h"
#include "tpu/pjrt/executable.h"
#include "tpu/trace.h"

namespace lockstep::tpu {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

inline std::shared_ptr<pjrt::Client> cpu() {
  static const auto client =
      pjrt::Client::create(pjrt::Plugin::load(CPU_PLUGIN), Deadline::after(std::chrono::seconds(60)));
  return client;
}

// Returns the program's results for these arguments.
inline Tensors run(const std::string& program, const Tensors& arguments, std::size_t count) {
  const auto client = cpu();
  const auto executable = pjrt::Executable::compile(client, program, {});
  std::vector<pjrt::Buffer> buffers;
  std::vector<const pjrt::Buffer*> list;
  buffers.reserve(arguments.size());
  for (const auto& argument : arguments) {
    const auto values = argument.detach().contiguous();
    buffers.push_back(client->copy_to_device(
        values.const_data_ptr(), {ops::dtype_of(values.scalar_type()), values.sizes().vec()}, client->devices()[0]));
    list.push_back(&buffers.back());
  }
  Tensors results;
  const auto run = executable.run({list});
  for (const auto& output : run.outputs[0]) {
    const auto shape = output.shape();
    auto values = at::empty(shape.sizes, ops::scalar_type_of(shape.dtype));
    output.copy_to_host(values.mutable_data_ptr(), values.nbytes(), Deadline::after(std::chrono::seconds(60)));
    results.push_back(values);
  }
  EXPECT_EQ(results.size(), count);
  return results;
}

// The function's value, then the gradients of arguments that are floating-point numbers. So that each element of the
// value counts by itself, they are of the sum of its products with cosines.
inline Tensors value_and_gradients(const Function& function, const Tensors& arguments, const at::Tensor& weights) {
  Tensors wanted;
  for (const auto& argument : arguments)
    if (argument.requires_grad()) wanted.push_back(argument);
  const auto value = function(arguments);
  Tensors all{value};
  if (!wanted.empty() && value.requires_grad()) {
    for (const auto& gradient :
         torch::autograd::grad({(value * weights.to(value.device())).sum()}, wanted, {}, {}, false, true))
      if (gradient.defined()) all.push_back(gradient);
  }
  return all;
}

// operators: gets the names of those that the program was made of.
inline void expect_same(const Function& function, Tensors arguments, double tolerance = 2e-5,
                        std::set<std::string>* operators = nullptr, bool for_cpu = true) {
  for (auto& argument : arguments) {
    argument = argument.detach().clone();
    if (argument.is_floating_point()) argument.requires_grad_();
  }
  const auto shape = function(arguments);
  const auto weights = at::arange(shape.numel(), at::kFloat).cos().view(shape.sizes());
  const auto expected = value_and_gradients(function, arguments, weights);
  std::string program;
  std::size_t outputs = 0;
  {
    Trace trace(for_cpu);
    Tensors traced;
    for (const auto& argument : arguments)
      traced.push_back(
          trace.argument(argument.sizes(), argument.scalar_type()).requires_grad_(argument.requires_grad()));
    const auto results = value_and_gradients(function, traced, weights);
    outputs = results.size();
    program = trace.finish(results);
    if (operators != nullptr) operators->insert(trace.operators().begin(), trace.operators().end());
  }
  const auto found = run(program, arguments, outputs);
  ASSERT_EQ(found.size(), expected.size()) << program;
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].sizes(), expected[i].sizes()) << i << "\n" << program;
    ASSERT_EQ(found[i].scalar_type(), expected[i].scalar_type()) << i << "\n" << program;
    if (expected[i].numel() == 0) continue;
    const auto difference = (found[i].to(at::kDouble) - expected[i].to(at::kDouble)).abs();
    const auto scale = expected[i].to(at::kDouble).abs().max().item<double>();
    ASSERT_LT(difference.max().item<double>(), tolerance * std::max(scale, 1.0)) << i << "\n" << program;
  }
}

inline at::Tensor numbers(at::IntArrayRef sizes) { return at::randn(sizes); }
inline at::Tensor positive(at::IntArrayRef sizes) { return at::rand(sizes) + 0.5; }

using One = std::function<at::Tensor(const at::Tensor&)>;
using Two = std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>;

inline std::set<std::string> compared;  // lowerings, by name

// An index for each dimension, or none for all of the dimension.
inline c10::List<std::optional<at::Tensor>> indices(std::initializer_list<at::Tensor> given) {
  c10::List<std::optional<at::Tensor>> list;
  for (const auto& tensor : given) list.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
  return list;
}

class EachLowering : public testing::Test {
 protected:
  static void SetUpTestSuite() { Trace before_the_first_backward; }
  void SetUp() override { at::manual_seed(1); }

  Sizes shape(std::size_t least = 0, std::size_t most = 4) {
    Sizes sizes(std::uniform_int_distribution<std::size_t>(least, most)(random_));
    for (auto& size : sizes) size = std::uniform_int_distribution<std::int64_t>(1, 5)(random_);
    return sizes;
  }
  std::int64_t dimension(const Sizes& sizes) {
    return std::uniform_int_distribution<std::int64_t>(-static_cast<std::int64_t>(sizes.size()),
                                                       static_cast<std::int64_t>(sizes.size()) - 1)(random_);
  }

  static void same(const Function& function, const Tensors& arguments, double tolerance = 2e-5) {
    expect_same(function, arguments, tolerance, &compared);
  }

  // In float32, float64 and bfloat16, whose numbers have 8 bits.
  void of_one(const std::vector<One>& functions, bool only_positive = false) {
    for (const auto& function : functions) {
      for (const auto& [dtype, tolerance] : std::vector<std::pair<at::ScalarType, double>>{
               {at::kFloat, 2e-5}, {at::kDouble, 1e-6}, {at::kBFloat16, 3e-2}}) {
        auto x = (only_positive ? positive(shape()) : numbers(shape())).to(dtype);
        same([&](const Tensors& all) { return function(all[0]); }, {x}, tolerance);
      }
    }
  }

  // Functions of two tensors whose sizes are broadcast.
  void of_two(const std::vector<Two>& functions) {
    for (const auto& function : functions) {
      for (int round = 0; round < 3; ++round) {
        const auto sizes = shape(1);
        auto other = sizes;
        for (auto& size : other)
          if (std::uniform_int_distribution<int>(0, 2)(random_) == 0) size = 1;
        if (round == 2) other.erase(other.begin());
        same([&](const Tensors& all) { return function(all[0], all[1]); }, {positive(sizes), positive(other)});
      }
    }
  }

  std::mt19937 random_{1};
};

}  // namespace lockstep::tpu
