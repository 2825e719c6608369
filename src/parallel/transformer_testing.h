// For tests: a transformer of bytes whose code knows nothing of how it is divided.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace lockstep::parallel {

struct TransformerOptions {
  std::int64_t layers = 2, width = 24, head = 2, sequence = 12, classes = 48;
  bool tied = false;  // the head's weight is the token embedding's, in stages that have both
};

// Ids [batch, sequence] to [batch, sequence, width].
struct FrontImpl : torch::nn::Module {
  explicit FrontImpl(const TransformerOptions& options) {
    token = register_module("token", torch::nn::Embedding(options.classes, options.width));
    place = register_module("place", torch::nn::Embedding(options.sequence, options.width));
  }
  at::Tensor forward(const at::Tensor& ids) { return token(ids) + place(at::arange(ids.size(1), ids.options())); }

  torch::nn::Embedding token = nullptr, place = nullptr;
};

// Pre-norm, causal attention, GELU. The rows of qkv are ordered by head.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const TransformerOptions& options) : head(options.head) {
    const auto width = options.width;
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    out = register_module("out", torch::nn::Linear(width, width));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }

  at::Tensor forward(at::Tensor x) {
    const auto heads = qkv(norm1(x)).unflatten(-1, {-1, 3, head}).permute({3, 0, 2, 1, 4});
    const auto attended = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0, /*is_causal=*/true);
    x = x + out(attended.transpose(1, 2).flatten(2));
    return x + down(torch::gelu(up(norm2(x))));
  }

  const std::int64_t head;
  torch::nn::LayerNorm norm1 = nullptr, norm2 = nullptr;
  torch::nn::Linear qkv = nullptr, out = nullptr, up = nullptr, down = nullptr;
};

// A linear layer of its own, whose weight may be another layer's.
struct HeadImpl : torch::nn::Module {
  HeadImpl(const TransformerOptions& options, const at::Tensor& shared) {
    const auto own = 0.2 * torch::randn({options.classes, options.width});
    weight = register_parameter("weight", shared.defined() ? shared : own);
    bias = register_parameter("bias", torch::zeros({options.classes}));
  }
  at::Tensor forward(const at::Tensor& x) { return torch::linear(x, weight, bias); }

  at::Tensor weight, bias;
};
TORCH_MODULE(Head);

// To logits [batch, sequence, classes].
struct BackImpl : torch::nn::Module {
  BackImpl(const TransformerOptions& options, const at::Tensor& shared) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})));
    head = register_module("head", Head(options, shared));
  }
  at::Tensor forward(const at::Tensor& x) { return head(norm(x)); }

  torch::nn::LayerNorm norm = nullptr;
  Head head = nullptr;
};

// The layers `begin` to `end` of front, blocks and back, named by their numbers: "0.token.weight".
struct TransformerImpl : torch::nn::Module {
  TransformerImpl(const TransformerOptions& options, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = 0; i < options.layers + 2; ++i) {
      auto layer = make_layer(options, i);  // those that are not kept draw their initial values as well
      if (i >= begin && i < end) layers.push_back(register_module(std::to_string(i), layer));
    }
  }

  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : layers) {
      if (auto* const front = layer->as<FrontImpl>()) x = front->forward(x);
      if (auto* const block = layer->as<BlockImpl>()) x = block->forward(x);
      if (auto* const back = layer->as<BackImpl>()) x = back->forward(x);
    }
    return x;
  }

  std::shared_ptr<torch::nn::Module> make_layer(const TransformerOptions& options, std::int64_t i) const {
    if (i == 0) return std::make_shared<FrontImpl>(options);
    if (i == options.layers + 1) {
      const auto* const front = layers.empty() ? nullptr : layers.front()->as<FrontImpl>();
      const bool shares = options.tied && front != nullptr;
      return std::make_shared<BackImpl>(options, shares ? front->token->weight : at::Tensor());
    }
    return std::make_shared<BlockImpl>(options);
  }

  std::vector<std::shared_ptr<torch::nn::Module>> layers;
};
TORCH_MODULE(Transformer);

// Stage `i` of `stages`, with the same values at each call, in double precision. All threads may call.
inline Transformer make_transformer(const TransformerOptions& options = {}, int i = 0, int stages = 1) {
  static std::mutex making;  // initial values come from the process's generator
  const std::lock_guard lock(making);
  torch::manual_seed(3);
  const auto layers = options.layers + 2;
  Transformer net(options, i * layers / stages, (i + 1) * layers / stages);
  net->to(at::kDouble);
  return net;
}

using Parameters = std::map<std::string, at::Tensor>;

inline Parameters parameters_of(const torch::nn::Module& module) {
  Parameters all;
  for (const auto& each : module.named_parameters()) all[each.key()] = each.value();
  return all;
}

// Tied ones once.
inline std::vector<at::Tensor> trained_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const auto& parameter : module.parameters()) {
    const auto is_same = [&](const auto& other) { return other.is_same(parameter); };
    if (parameter.requires_grad() && std::ranges::none_of(all, is_same)) all.push_back(parameter);
  }
  return all;
}

struct Batch {
  at::Tensor ids, labels;
};

inline Batch make_batch(int step, std::int64_t examples, const TransformerOptions& options = {}) {
  const auto text = (at::arange(examples * (options.sequence + 1)) * 7 + step * 5).pow(2).remainder(options.classes);
  const auto rows = text.view({examples, options.sequence + 1});
  return {rows.narrow(1, 0, options.sequence).contiguous(), rows.narrow(1, 1, options.sequence).contiguous()};
}

inline at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& labels) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), labels.flatten());
}

// The largest difference of the parameters that `some` has.
inline double largest_difference(const Parameters& some, const Parameters& all) {
  const at::NoGradGuard no_gradient;
  double largest = 0;
  for (const auto& [name, value] : some) largest = std::max(largest, (value - all.at(name)).abs().max().item<double>());
  return largest;
}

inline constexpr std::int64_t kExpertWidth = 6;

struct ExpertImpl : torch::nn::Module {
  ExpertImpl()
      : up(register_module("up", torch::nn::Linear(kExpertWidth, 10))),
        down(register_module("down", torch::nn::Linear(10, kExpertWidth))) {}
  at::Tensor forward(const at::Tensor& x) { return down(torch::tanh(up(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Expert);

}  // namespace lockstep::parallel
