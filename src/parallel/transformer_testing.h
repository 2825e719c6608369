// For tests: a transformer of bytes whose code knows nothing of how it is divided.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <mutex>
#include <vector>

namespace lockstep::parallel {

struct TransformerOptions {
  std::int64_t layers = 2, width = 24, head = 2, sequence = 12, classes = 48;
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
TORCH_MODULE(Block);

// Ids [batch, sequence] to logits [batch, sequence, classes].
struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const TransformerOptions& options) {
    token = register_module("token", torch::nn::Embedding(options.classes, options.width));
    place = register_module("place", torch::nn::Embedding(options.sequence, options.width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < options.layers; ++i) blocks->push_back(Block(options));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})));
    head = register_module("head", torch::nn::Linear(options.width, options.classes));
  }

  at::Tensor forward(const at::Tensor& ids) {
    auto x = token(ids) + place(at::arange(ids.size(1), ids.options()));
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return head(norm(x));
  }

  torch::nn::Embedding token = nullptr, place = nullptr;
  torch::nn::ModuleList blocks = nullptr;
  torch::nn::LayerNorm norm = nullptr;
  torch::nn::Linear head = nullptr;
};
TORCH_MODULE(Transformer);

// The same values at each call, in double precision.
inline Transformer make_transformer(const TransformerOptions& options = {}) {
  static std::mutex making;  // initial values come from the process's generator
  const std::lock_guard lock(making);
  torch::manual_seed(3);
  Transformer net(options);
  net->to(at::kDouble);
  return net;
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

inline double largest_difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  const at::NoGradGuard no_gradient;
  TORCH_CHECK(a.size() == b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, (a[i] - b[i]).abs().max().item<double>());
  return largest;
}

}  // namespace lockstep::parallel
