// For tests: a small net with parameters of several kinds, data for it, and optimizers.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <memory>
#include <vector>

#include "gradient/replicated_parameters.h"
#include "lockstep/optimizer/optimizer.h"

namespace lockstep::gradient {

inline Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

struct NetImpl : torch::nn::Module {
  explicit NetImpl(at::ScalarType dtype) {
    first = register_module("first", torch::nn::Linear(7, 19));
    second = register_module("second", torch::nn::Linear(19, 5));
    frozen = register_parameter("frozen", torch::ones({5}), /*requires_grad=*/false);
    unused = register_parameter("unused", torch::ones({3}));
    to(dtype);
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(first(x))) * frozen; }
  torch::nn::Linear first = nullptr, second = nullptr;
  torch::Tensor frozen, unused;
};

inline std::shared_ptr<NetImpl> make_net(at::ScalarType dtype) {
  torch::manual_seed(3);
  return std::make_shared<NetImpl>(dtype);
}

struct Batch {
  torch::Tensor x, y;
};

// Batch sizes that leave some replicas without an example.
inline std::vector<Batch> batches(int count, at::ScalarType dtype) {
  torch::manual_seed(17);
  std::vector<Batch> made;
  for (int i = 0; i < count; ++i) {
    const int size = i % 4 == 3 ? 2 : 8;
    made.push_back({torch::randn({size, 7}, dtype), torch::randn({size, 5}, dtype)});
  }
  return made;
}

inline void expect_close(const ReplicatedParameters& a, const ReplicatedParameters& b, double tolerance) {
  for (std::size_t i = 0; i < a.slots().size(); ++i) {
    const double difference = (a.parameter(0, i) - b.parameter(0, i)).abs().max().item<double>();
    EXPECT_LE(difference, tolerance) << a.slots()[i].name;
  }
}

// Every rule, and every kind of clipping.
struct NamedOptimizer {
  const char* name;
  Optimizer optimizer;
};

inline std::vector<NamedOptimizer> optimizers() {
  return {{"sgd", SGD({.learning_rate = 0.05})},
          {"momentum", SGD({.learning_rate = 0.02, .momentum = 0.9})},
          {"nesterov, clipvalue", SGD({.learning_rate = 0.02, .momentum = 0.9, .nesterov = true, .clipvalue = 0.1})},
          {"adam", Adam({.learning_rate = 0.01, .epsilon = 1e-3})},
          {"adam, clipnorm", Adam({.learning_rate = 0.01, .epsilon = 1e-3, .clipnorm = 0.3})},
          {"adamw, global clipnorm", AdamW({.learning_rate = 0.01, .epsilon = 1e-3, .global_clipnorm = 0.5})},
          {"rmsprop", RMSprop({.learning_rate = 0.01, .momentum = 0.5, .epsilon = 1e-3, .centered = true})},
          {"adagrad", Adagrad({.learning_rate = 0.05})}};
}

}  // namespace lockstep::gradient
