// The transformer of benchmarks/peers/pytorch_parallel.py: bytes in, logits out; pre-norm, causal attention, GELU.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace benchmarks {

struct GptSizes {
  std::int64_t layers = 4, width = 256, sequence = 64;
};

struct FrontImpl : torch::nn::Module {
  explicit FrontImpl(const GptSizes& sizes)
      : token(register_module("token", torch::nn::Embedding(256, sizes.width))),
        place(register_parameter("place", 0.02 * torch::randn({sizes.sequence, sizes.width}))) {}
  at::Tensor forward(const at::Tensor& x) { return token(x) + place; }

  torch::nn::Embedding token;
  at::Tensor place;
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const GptSizes& sizes) {
    const auto width = sizes.width;
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));  // ordered by head
    out = register_module("out", torch::nn::Linear(width, width));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  at::Tensor forward(at::Tensor x) {
    const auto heads = qkv(norm1(x)).unflatten(-1, {-1, 3, 32}).permute({3, 0, 2, 1, 4});
    const auto y = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0, /*is_causal=*/true);
    x = x + out(y.transpose(1, 2).flatten(2));
    return x + down(torch::gelu(up(norm2(x))));
  }

  torch::nn::LayerNorm norm1 = nullptr, norm2 = nullptr;
  torch::nn::Linear qkv = nullptr, out = nullptr, up = nullptr, down = nullptr;
};

struct BackImpl : torch::nn::Module {
  explicit BackImpl(const GptSizes& sizes)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({sizes.width})))),
        head(register_module("head", torch::nn::Linear(sizes.width, 256))) {}
  at::Tensor forward(const at::Tensor& x) { return head(norm(x)); }

  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};

// Layers `begin` to `end` of: front, blocks, back. `made` is called with each as soon as it is made.
struct GptImpl : torch::nn::Module {
  GptImpl(const GptSizes& sizes, std::int64_t begin, std::int64_t end,
          const std::function<void(const std::string&, torch::nn::Module&)>& made = {}) {
    for (auto i = begin; i < end; ++i) {
      const auto name = std::to_string(i);
      if (i == 0) {
        front = register_module(name, std::make_shared<FrontImpl>(sizes));
      } else if (i == sizes.layers + 1) {
        back = register_module(name, std::make_shared<BackImpl>(sizes));
      } else {
        blocks.push_back(register_module(name, std::make_shared<BlockImpl>(sizes)));
      }
      if (made) made(name, *children().back());
    }
  }
  at::Tensor forward(at::Tensor x) {
    if (front) x = front->forward(x);
    for (const auto& block : blocks) x = block->forward(x);
    return back ? back->forward(x) : x;
  }

  std::shared_ptr<FrontImpl> front;
  std::vector<std::shared_ptr<BlockImpl>> blocks;
  std::shared_ptr<BackImpl> back;
};
TORCH_MODULE(Gpt);

}  // namespace benchmarks
