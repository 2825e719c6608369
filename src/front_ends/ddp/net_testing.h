// For tests: a net with parameters of several kinds, and batches that ranks take parts of.
#pragma once

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <mutex>
#include <vector>

namespace lockstep::ddp {

using at::Tensor;

// `extra` is used only for examples whose first feature is positive, `never` for none; `frozen` requires no gradient.
struct Net : torch::nn::Module {
  explicit Net(bool normalized = false) {
    at::manual_seed(1);
    first = register_module("first", torch::nn::Linear(6, 16));
    second = register_module("second", torch::nn::Linear(16, 3));
    extra = register_parameter("extra", at::randn({16}) * 0.3);
    never = register_parameter("never", at::ones({5}));
    frozen = register_parameter("frozen", at::ones({16}), false);
    if (normalized) norm = register_module("norm", torch::nn::BatchNorm1d(16));
    to(at::kDouble);
  }

  Tensor forward(const Tensor& x) {
    auto h = at::tanh(first(x)) * frozen;
    if (!norm.is_empty()) h = norm(h);
    const auto mask = x.select(1, 0) > 1;
    if (mask.any().item<bool>()) h = h + mask.to(x.scalar_type()).unsqueeze(1) * extra;
    return second(h);
  }

  torch::nn::Linear first = nullptr, second = nullptr;
  torch::nn::BatchNorm1d norm = nullptr;
  Tensor extra, never, frozen;
};

struct Batch {
  Tensor x, y;
};

// Every third batch is ragged. The same on all ranks, which take parts of it.
inline std::vector<Batch> batches(int count, int size) {
  auto generator = at::detail::createCPUGenerator(7);
  std::vector<Batch> all;
  for (int i = 0; i < count; ++i) {
    const std::int64_t examples = i % 3 == 2 ? size + 2 : 8 * size;
    all.push_back({at::randn({examples, 6}, generator, at::kDouble), at::randn({examples, 3}, generator, at::kDouble)});
  }
  return all;
}

inline Batch part_of(const Batch& batch, int rank, int size) {
  return {batch.x.tensor_split(size)[static_cast<std::size_t>(rank)],
          batch.y.tensor_split(size)[static_cast<std::size_t>(rank)]};
}

inline Tensor loss_of(const Tensor& output, const Tensor& y) {
  return at::mse_loss(output, y) + 0.1 * at::smooth_l1_loss(output, y);
}

inline void expect_equal(const torch::nn::Module& a, const torch::nn::Module& b, double tolerance) {
  const at::NoGradGuard no_gradient;
  const auto left = a.named_parameters(), right = b.named_parameters();
  for (const auto& parameter : left) {
    const auto difference = (parameter.value() - right[parameter.key()]).abs().max().item<double>();
    EXPECT_LE(difference, tolerance) << parameter.key();
  }
}

// Modules are made one at a time: at::manual_seed is one for the process.
inline std::shared_ptr<Net> make_net(bool normalized = false) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return std::make_shared<Net>(normalized);
}

}  // namespace lockstep::ddp
