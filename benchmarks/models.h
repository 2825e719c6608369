// The models of the comparison with other libraries, as users write them.
#pragma once

#include <ATen/Functions.h>
#include <lockstep/lockstep.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <memory>
#include <string>
#include <vector>

namespace benchmarks {

using namespace lockstep;

// The seed program's layers as a module of LibTorch's alone.
struct PlainSeedCnn : torch::nn::Module {
  PlainSeedCnn() {
    convolution = register_module("convolution", torch::nn::Conv2d(1, 32, 3));
    hidden = register_module("hidden", torch::nn::Linear(5408, 64));
    output = register_module("output", torch::nn::Linear(64, 10));
  }
  virtual Tensor forward(const Tensor& x) {
    const auto features = at::max_pool2d(at::relu(convolution(x)), 2).flatten(1);
    return output(at::relu(hidden(features)));
  }
  torch::nn::Conv2d convolution = nullptr;
  torch::nn::Linear hidden = nullptr, output = nullptr;
};

// PlainSeedCnn with our operators.
struct OwnSeedCnn : PlainSeedCnn {
  Tensor forward(const Tensor& x) override {
    const auto features = ops::conv2d_relu_max_pool2d(x, convolution->weight, convolution->bias).flatten(1);
    return output(ops::linear_relu(features, hidden->weight, hidden->bias));
  }
};

// Two layers of width 256 with 4 heads over 64 tokens; normalization comes first, as in
// torch.nn.TransformerEncoderLayer with norm_first. [batch, 64] numbers of tokens to [batch, 10].
struct Transformer : torch::nn::Module {
  static constexpr std::int64_t kTokens = 64, kVocabulary = 1000, kWidth = 256, kHeads = 4;

  struct Block : torch::nn::Module {
    Block() {
      const auto norm = [] { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})); };
      before_attention = register_module("before_attention", norm());
      before_mlp = register_module("before_mlp", norm());
      projections = register_module("projections", torch::nn::Linear(kWidth, 3 * kWidth));
      merge = register_module("merge", torch::nn::Linear(kWidth, kWidth));
      wide = register_module("wide", torch::nn::Linear(kWidth, 4 * kWidth));
      narrow = register_module("narrow", torch::nn::Linear(4 * kWidth, kWidth));
    }
    Tensor forward(const Tensor& x) {
      const auto heads = projections(before_attention(x)).view({x.size(0), x.size(1), 3, kHeads, kWidth / kHeads});
      const auto head = [&](std::int64_t i) { return heads.select(2, i).transpose(1, 2); };
      const auto attention = at::scaled_dot_product_attention(head(0), head(1), head(2));
      const auto attended = x + merge(attention.transpose(1, 2).reshape(x.sizes()));
      return attended + narrow(at::relu(wide(before_mlp(attended))));
    }
    torch::nn::LayerNorm before_attention = nullptr, before_mlp = nullptr;
    torch::nn::Linear projections = nullptr, merge = nullptr, wide = nullptr, narrow = nullptr;
  };

  Transformer() {
    tokens = register_module("tokens", torch::nn::Embedding(kVocabulary, kWidth));
    positions = register_parameter("positions", at::randn({kTokens, kWidth}) * 0.02);
    first = register_module("first", std::make_shared<Block>());
    second = register_module("second", std::make_shared<Block>());
    output = register_module("output", torch::nn::Linear(kWidth, 10));
  }
  Tensor forward(const Tensor& x) { return output(second->forward(first->forward(tokens(x) + positions)).mean(1)); }

  torch::nn::Embedding tokens = nullptr;
  Tensor positions;
  std::shared_ptr<Block> first, second;
  torch::nn::Linear output = nullptr;
};

// ResNet-18 for small images, [batch, 3, size, size] to [batch, 10]: He et al., "Deep residual learning for image
// recognition" (2016). The network is torchvision's but for the first layer, which neither strides nor pools. `width`:
// channels of the first stage, 64 in torchvision.
struct ResNet18 : torch::nn::Module {
  struct Block : torch::nn::Module {
    Block(std::int64_t in, std::int64_t out, std::int64_t stride)
        : first(register_module("first", convolution(in, out, 3, stride))),
          second(register_module("second", convolution(out, out, 3, 1))),
          first_norm(register_module("first_norm", torch::nn::BatchNorm2d(out))),
          second_norm(register_module("second_norm", torch::nn::BatchNorm2d(out))) {
      if (stride == 1 && in == out) return;
      shortcut = register_module("shortcut", convolution(in, out, 1, stride));
      shortcut_norm = register_module("shortcut_norm", torch::nn::BatchNorm2d(out));
    }
    Tensor forward(const Tensor& x) {
      const auto y = second_norm(second(at::relu(first_norm(first(x)))));
      return at::relu(y + (shortcut.is_empty() ? x : shortcut_norm(shortcut(x))));
    }
    torch::nn::Conv2d first, second, shortcut = nullptr;
    torch::nn::BatchNorm2d first_norm, second_norm, shortcut_norm = nullptr;
  };

  static torch::nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride) {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
  }

  explicit ResNet18(std::int64_t width = 64)
      : stem(register_module("stem", convolution(3, width, 3, 1))),
        stem_norm(register_module("stem_norm", torch::nn::BatchNorm2d(width))),
        output(register_module("output", torch::nn::Linear(8 * width, 10))) {
    std::int64_t in = width;
    for (std::int64_t stage = 0; stage < 4; ++stage) {
      for (std::int64_t i = 0; i < 2; ++i) {
        const auto out = width << stage;
        blocks.push_back(register_module("block" + std::to_string(blocks.size()),
                                         std::make_shared<Block>(in, out, stage > 0 && i == 0 ? 2 : 1)));
        in = out;
      }
    }
  }
  Tensor forward(const Tensor& images) {
    auto x = at::relu(stem_norm(stem(images)));
    for (const auto& block : blocks) x = block->forward(x);
    return output(at::adaptive_avg_pool2d(x, {1, 1}).flatten(1));
  }

  torch::nn::Conv2d stem;
  torch::nn::BatchNorm2d stem_norm;
  torch::nn::Linear output;
  std::vector<std::shared_ptr<Block>> blocks;
};

struct Work {
  Model model;
  Tensor x;  // `examples` of them
};

// `kind`: "sequential", or for the seed CNN "own" and "plain". For the strategy in scope.
inline Work make_work(const std::string& name, const std::string& kind, std::int64_t examples) {
  if (name == "transformer") {
    return {Model([] { return std::make_shared<Transformer>(); }),
            at::randint(Transformer::kVocabulary, {examples, Transformer::kTokens}, at::kLong)};
  }
  if (name == "mlp") {
    return {Sequential({Dense(512, {.activation = "relu"}), Dense(512, {.activation = "relu"}), Dense(10)}),
            at::rand({examples, 784})};
  }
  if (name == "cifar_cnn") {
    const Conv2DOptions same{.padding = "same", .activation = "relu"};
    return {Sequential({Conv2D(32, 3, same), Conv2D(32, 3, same), MaxPooling2D(), Conv2D(64, 3, same),
                        Conv2D(64, 3, same), MaxPooling2D(), Flatten(), Dense(512, {.activation = "relu"}), Dense(10)}),
            at::rand({examples, 3, 32, 32})};
  }
  const auto x = at::rand({examples, 1, 28, 28});
  if (kind == "plain") return {Model([] { return std::make_shared<PlainSeedCnn>(); }), x};
  if (kind == "own") return {Model([] { return std::make_shared<OwnSeedCnn>(); }), x};
  return {Sequential({Conv2D(32, 3, {.activation = "relu"}), MaxPooling2D(), Flatten(),
                      Dense(64, {.activation = "relu"}), Dense(10)}),
          x};
}

}  // namespace benchmarks
