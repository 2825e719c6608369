// For tests: what a drawn loop computes in one process, in plain LibTorch.
#pragma once

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "drawn_mesh_loop.h"

namespace lockstep {

inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(const MeshLoop& loop,
                                                               const std::vector<at::Tensor>& trained) {
  if (loop.adamw) return std::make_unique<torch::optim::AdamW>(trained, torch::optim::AdamWOptions(1e-2).eps(1e-3));
  return std::make_unique<torch::optim::SGD>(trained, torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
}

inline DrawnData data_of(const MeshLoop& loop, const MeshBatch& batch) {
  auto data = make_mesh_data(loop.net, batch.examples(), batch.seed);
  if (loop.negative_id) data.x.view({-1}).narrow(0, 0, 1).fill_(-1);
  return data;
}

inline at::Tensor sum_of_losses(const at::Tensor& logits, const at::Tensor& y) {
  return at::cross_entropy_loss(logits.flatten(0, -2), y.flatten(), {}, at::Reduction::Sum);
}

// The penalty that is added to the loss, of the parameters that most nets have.
inline at::Tensor penalty_of(const MeshLoop& loop, const torch::nn::Module& net) {
  at::Tensor sum;
  for (const auto& each : net.named_parameters()) {
    if (!each.key().ends_with("first.weight") && !each.key().ends_with("up.weight")) continue;
    if (each.key().find("expert") != std::string::npos) continue;
    const auto norm = each.value().norm() + each.value().pow(2).sum();
    sum = sum.defined() ? sum + norm : norm;
  }
  return sum.defined() ? loop.penalty * sum : at::Tensor();
}

inline at::Tensor with_penalty(const at::Tensor& loss, const at::Tensor& more) {
  return more.defined() ? loss + more : loss;
}

// The outputs of a plain loop's forwards of whole batches, in order, and the weights at its end.
struct Plain {
  std::vector<at::Tensor> outputs;
  std::vector<double> penalties;
  Values weights;
};

class PlainLoop {
 public:
  PlainLoop(const MeshLoop& loop, at::ScalarType dtype)
      : loop_(loop), net_(options(loop, dtype), 0, loop.net.count()), trained_(trained_of(net_->parameters())) {}

  Plain run() {
    const auto optimizer = make_optimizer(loop_, trained_);
    for (const auto& step : loop_.steps) {
      const auto& batches = step.batches;
      if (step.evaluates) evaluate(batches[0]);
      optimizer->zero_grad(step.set_to_none);
      if (step.extra_forward) {
        if (loop_.has("pipeline")) {
          evaluate(batches[0]);
        } else {
          forward(batches[0]);
        }
      }
      std::vector<at::Tensor> losses;
      for (const auto& batch : batches) losses.push_back(loss_of(batch));
      for (const auto& loss : losses) loss.backward();
      if (loop_.max_norm > 0) torch::nn::utils::clip_grad_norm_(trained_, loop_.max_norm);
      optimizer->step();
    }
    evaluate(loop_.steps[0].batches[0]);
    plain_.weights = values_of(*net_);
    return std::move(plain_);
  }

 private:
  static MeshNetOptions options(const MeshLoop& loop, at::ScalarType dtype) {
    auto net = loop.net;
    net.dtype = dtype;
    return net;
  }

  at::Tensor forward(const MeshBatch& batch) {
    auto x = data_of(loop_, batch).x;
    if (x.is_floating_point()) x = x.to(net_->parameters()[0].scalar_type());
    const auto y = loop_.has("pipeline") && loop_.has_norm() ? in_microbatches(x, batch) : net_(x);
    plain_.outputs.push_back(y.detach());
    plain_.penalties.push_back(0);
    return y;
  }

  // Each microbatch is of all pipelines, as batch normalization in stages sees it.
  at::Tensor in_microbatches(const at::Tensor& x, const MeshBatch& batch) {
    std::int64_t most = 0;
    for (std::size_t row = 1; row < batch.begins.size(); ++row)
      most = std::max(most, batch.begins[row] - batch.begins[row - 1]);
    const auto count = std::min<std::int64_t>(loop_.microbatches, most);
    std::vector<at::Tensor> rows, outputs;
    for (std::int64_t i = 0; i < count; ++i) {
      std::vector<at::Tensor> parts;
      for (std::size_t row = 1; row < batch.begins.size(); ++row) {
        const auto all = at::arange(batch.begins[row - 1], batch.begins[row], at::kLong);
        parts.push_back(all.tensor_split(count)[static_cast<std::size_t>(i)]);
      }
      rows.push_back(at::cat(parts));
      outputs.push_back(net_(x.index_select(0, rows.back())));
    }
    return at::cat(outputs).index_select(0, at::cat(rows).argsort());
  }

  void evaluate(const MeshBatch& batch) {
    const at::NoGradGuard no_grad;
    net_->eval();
    forward(batch);
    net_->train();
  }

  at::Tensor loss_of(const MeshBatch& batch) {
    const auto y = forward(batch);
    auto loss = drawn_loss(y, data_of(loop_, batch).y);
    if (loop_.penalty > 0) {
      const auto penalty = penalty_of(loop_, *net_);
      if (penalty.defined()) plain_.penalties.back() = penalty.item<double>();
      loss = with_penalty(loss, penalty);
    }
    return loop_.balance > 0 ? loss + loop_.balance * net_->balance() : loss;
  }

  const MeshLoop& loop_;
  MeshNet net_;
  const std::vector<at::Tensor> trained_;
  Plain plain_;
};

}  // namespace lockstep
