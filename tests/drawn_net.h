// For tests: programs drawn by a seed. They train a module drawn from a grammar of the ways in which people write
// modules. Each program computes what a plain loop of LibTorch in one process does, or is refused.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <iostream>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/text.h"
#include "lockstep/ddp/sync_batch_norm.h"
#include "lockstep/parallel/recompute.h"

namespace lockstep {

// The choices of one program. A seed draws the same program on every rank.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : engine_(seed) {}

  int between(int low, int high) { return low + static_cast<int>(engine_() % static_cast<unsigned>(high - low + 1)); }
  bool chance(int percent) { return between(1, 100) <= percent; }
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return choices.begin()[between(0, static_cast<int>(choices.size()) - 1)];
  }

 private:
  std::mt19937_64 engine_;
};

// --- the grammar

// Each maps x [examples, positions, width] to the same shape.
enum class Block {
  linear,
  tied,           // one weight in two operators: an autoencoder's
  masked,         // a weight times a mask
  shared,         // one layer under two names, called twice
  frozen,         // a layer that is not trained
  frozen_weight,  // a layer whose bias alone is trained
  layer_norm,
  batch_norm,  // SyncBatchNorm
  attention,
  unused  // a layer that no forward calls
};

struct NetOptions {
  std::vector<Block> blocks = {Block::linear};
  bool embedding = false;   // x are ids [examples, positions] of int64; else floats [examples, positions, features]
  bool tied_head = false;   // the head's weight is the embedding's
  bool tokens = false;      // a label for each position; else one for each example
  bool recomputes = false;  // each block's activations
  at::ScalarType dtype = at::kDouble;
  std::int64_t width = 8, heads = 2, positions = 4, features = 5, classes = 6;  // there are as many ids as classes
  std::uint64_t seed = 0;                                                       // of the first values

  std::string text() const {
    static const char* const names[] = {"linear",        "tied",       "masked",     "shared",    "frozen",
                                        "frozen_weight", "layer_norm", "batch_norm", "attention", "unused"};
    std::vector<std::string> words{toString(dtype), embedding ? "embedding" : "floats"};
    for (const auto block : blocks) words.emplace_back(names[static_cast<int>(block)]);
    words.emplace_back(tied_head ? "tied head" : "head");
    if (tokens) words.emplace_back("of tokens");
    if (recomputes) words.emplace_back("recomputed");
    return join(words, " ");
  }
};

// Draws one to three blocks of `of`.
inline NetOptions draw_net(Draw& draw, const std::vector<Block>& of) {
  NetOptions net;
  net.blocks.clear();
  for (int i = draw.between(1, 3); i > 0; --i) {
    net.blocks.push_back(of[static_cast<std::size_t>(draw.between(0, static_cast<int>(of.size()) - 1))]);
  }
  net.embedding = draw.chance(50);
  net.tied_head = net.embedding && draw.chance(50);
  net.tokens = draw.chance(30);
  net.seed = static_cast<std::uint64_t>(draw.between(1, 1000));
  return net;
}

struct DrawnBlockImpl : torch::nn::Module {
  DrawnBlockImpl(const NetOptions& options, Block kind_) : kind(kind_), heads(options.heads) {
    const auto width = options.width;
    const auto linear = [&](const char* name) { return register_module(name, torch::nn::Linear(width, width)); };
    if (kind == Block::tied || kind == Block::masked) {
      weight = register_parameter("weight", torch::empty({2 * width, width}));
      bias = register_parameter("bias", torch::empty({2 * width}));
      mask = register_buffer("mask", (at::arange(2 * width * width).view({2 * width, width}) % 3 != 0).to(at::kDouble));
    } else if (kind == Block::layer_norm) {
      layer_norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    } else if (kind == Block::batch_norm) {
      batch_norm = register_module("norm", SyncBatchNorm(width));
    } else if (kind == Block::attention) {
      first = register_module("qkv", torch::nn::Linear(width, 3 * width));  // ordered by head
      second = linear("out");
    } else {
      first = linear("first");
      if (kind == Block::shared) second = register_module("second", first);
    }
    if (kind == Block::frozen || kind == Block::frozen_weight) first->weight.set_requires_grad(false);
    if (kind == Block::frozen) first->bias.set_requires_grad(false);
  }

  at::Tensor forward(const at::Tensor& x) {
    switch (kind) {
      case Block::tied: return x + at::linear(at::tanh(at::linear(x, weight, bias)), weight.t());
      case Block::masked: return x + at::tanh(at::linear(x, weight * mask, bias)).unflatten(-1, {2, -1}).sum(-2);
      case Block::layer_norm: return layer_norm(x);
      case Block::batch_norm: return batch_norm(x.transpose(1, 2)).transpose(1, 2);
      case Block::attention: {
        const auto qkv = first(x).unflatten(-1, {-1, 3, x.size(-1) / heads}).permute({3, 0, 2, 1, 4});
        const auto attended = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2]);
        return x + second(attended.transpose(1, 2).flatten(2));
      }
      case Block::shared: return x + second(at::tanh(first(x)));
      case Block::unused: return x;
      default: return x + at::tanh(first(x));
    }
  }

  const Block kind;
  const std::int64_t heads;
  at::Tensor weight, bias, mask;
  torch::nn::Linear first = nullptr, second = nullptr;
  torch::nn::LayerNorm layer_norm = nullptr;
  SyncBatchNorm batch_norm = nullptr;
};
TORCH_MODULE(DrawnBlock);

// Returns logits [examples, classes], or [examples, positions, classes]. Its values are the same wherever it is made.
struct DrawnNetImpl : torch::nn::Module {
  explicit DrawnNetImpl(NetOptions options_) : options(std::move(options_)) {
    const auto width = options.width;
    if (options.embedding) {
      token = register_module("token", torch::nn::Embedding(options.classes, width));
    } else {
      front = register_module("front", torch::nn::Linear(options.features, width));
    }
    for (std::size_t i = 0; i < options.blocks.size(); ++i) {
      blocks.push_back(register_module(text("block", i), DrawnBlock(options, options.blocks[i])));
    }
    if (options.tied_head) {
      head_bias = register_parameter("head_bias", torch::empty({options.classes}));
    } else {
      head = register_module("head", torch::nn::Linear(width, options.classes));
    }
    to(at::kDouble);
    auto generator = at::detail::createCPUGenerator(options.seed);
    const torch::NoGradGuard no_grad;
    for (const auto& each : named_parameters()) {
      const bool scale = each.key().find("norm.weight") != std::string::npos;
      each.value().normal_(scale ? 1 : 0, 0.3, generator);
    }
    to(options.dtype);
  }

  at::Tensor forward(const at::Tensor& input) {
    auto x = options.embedding ? token(input) : front(input);
    for (auto& block : blocks) x = options.recomputes ? recompute(block, x) : block(x);
    if (!options.tokens) x = x.mean(1);
    return options.tied_head ? at::linear(x, token->weight, head_bias) : head(x);
  }

  const NetOptions options;
  torch::nn::Embedding token = nullptr;
  torch::nn::Linear front = nullptr, head = nullptr;
  std::vector<DrawnBlock> blocks;
  at::Tensor head_bias;
};
TORCH_MODULE(DrawnNet);

// --- data

struct DrawnData {
  at::Tensor x, y;
  DrawnData slice(std::int64_t begin, std::int64_t end) const {
    return {x.slice(0, begin, end), y.slice(0, begin, end)};
  }
};

inline DrawnData make_drawn_data(const NetOptions& net, std::int64_t examples, std::uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  const auto integers = [&](at::IntArrayRef shape) { return at::randint(net.classes, shape, generator, at::kLong); };
  const auto x = net.embedding
                     ? integers({examples, net.positions})
                     : at::randn({examples, net.positions, net.features}, generator, at::kDouble).to(net.dtype);
  return {x, net.tokens ? integers({examples, net.positions}) : integers({examples})};
}

// The mean over all labels. 0 where there is none, as a part of a mean.
inline at::Tensor drawn_loss(const at::Tensor& logits, const at::Tensor& y) {
  const auto sum = at::cross_entropy_loss(logits.flatten(0, -2), y.flatten(), {}, at::Reduction::Sum);
  return sum / static_cast<double>(std::max<std::int64_t>(1, y.numel()));
}

// --- comparisons

using Values = std::map<std::string, at::Tensor>;

// Copies of the parameters and buffers, in double precision.
inline Values values_of(const torch::nn::Module& module) {
  Values values;
  const auto add = [&](const auto& all) {
    for (const auto& each : all) values[each.key()] = each.value().detach().to(at::kDouble).clone();
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return values;
}

// Empty where `found` is `exact`, within 1e-9. In a `dtype` of 16 bits: within twice the largest error of `plain`,
// which LibTorch computed in 16 bits, or the distance of two neighbours there. Else says what differs most.
inline std::string differences(const Values& found, const Values& exact, const std::vector<Values>& plain = {},
                               at::ScalarType dtype = at::kBFloat16) {
  for (const auto& [name, value] : exact) {
    if (!found.contains(name)) return text("has no ", name);
  }
  double allowed = 1e-9;
  for (const auto& values : plain) {
    for (const auto& [name, value] : values) {
      const auto error = (value.to(at::kDouble) - exact.at(name)).abs();
      if (error.numel() > 0) allowed = std::max(allowed, 2 * error.max().item<double>());
    }
  }
  const double neighbours = plain.empty() ? 0 : dtype == at::kBFloat16 ? 0x1p-7 : 0x1p-10;
  std::string wrong;
  for (const auto& [name, value] : found) {
    if (!exact.contains(name)) return text("has ", name);
    if (value.sizes() != exact.at(name).sizes()) return text(name, " has another shape");
    const auto difference = (value.to(at::kDouble) - exact.at(name)).abs();
    const auto is_right = difference <= (exact.at(name).abs() * neighbours).clamp_min(allowed);  // false for NaN
    if (is_right.all().item<bool>()) continue;
    wrong += text(name, " differs by ", difference.max().item<double>(), ", allowed is ", allowed, "; ");
  }
  return wrong;
}

// --- the programs of a test

// One program: what it was, and either why it was refused, or how its results differ from the plain loop's (empty: they
// do not).
struct DrawnResult {
  std::string program;
  std::optional<std::string> refused = {};
  std::string wrong = {};
  bool is_wrong_on_purpose = false;  // so that a refusal is due
};

// A seed whose program failed once, and how the program ends since. A refusal in the place of a right result, which
// would hide that a mend was lost, fails the test, and so does the reverse.
struct KeptSeed {
  enum class Ends { trained, refused };
  std::uint64_t seed = 0;
  Ends ends = Ends::trained;
};

class DrawnResults {
 public:
  void add(const DrawnResult& result) {
    if (!result.refused) return;
    const auto why = result.refused->substr(0, 120);
    ++(result.is_wrong_on_purpose ? due_ : refused_)[why];
  }
  static int sum_of(const std::map<std::string, int>& refusals) {
    int sum = 0;
    for (const auto& [why, count] : refusals) sum += count;
    return sum;
  }
  int refused() const { return sum_of(refused_); }
  void print(int programs) const {
    std::cout << "  " << programs << " programs: " << refused() << " refused, and " << sum_of(due_)
              << " that are wrong on purpose\n";
    for (const auto& [why, count] : refused_) std::cout << "  " << count << " x " << why << "\n";
    for (const auto& [why, count] : due_) std::cout << "  wrong on purpose: " << count << " x " << why << "\n";
  }

 private:
  std::map<std::string, int> refused_, due_;
};

// Runs the programs of `kept`, and LOCKSTEP_PROGRAMS others (`usually`, where the variable is not set), from
// LOCKSTEP_FIRST_SEED (1) on; or that of LOCKSTEP_SEED alone. Fails where one computes something else, where a kept one
// ends otherwise, and where more than `most_refused` of the others are refused that are not wrong on purpose.
inline void check_drawn_programs(const std::vector<KeptSeed>& kept, int usually, double most_refused,
                                 const std::function<DrawnResult(std::uint64_t)>& run) {
  const auto number_in = [](const char* variable, std::uint64_t otherwise) {
    const char* const given = std::getenv(variable);
    return given == nullptr ? otherwise : std::strtoull(given, nullptr, 10);
  };
  std::map<std::uint64_t, KeptSeed::Ends> expected;
  std::vector<std::uint64_t> seeds;
  for (const auto& each : kept) {
    expected[each.seed] = each.ends;
    seeds.push_back(each.seed);
  }
  const auto first = number_in("LOCKSTEP_FIRST_SEED", 1);
  for (auto i = first; i < first + number_in("LOCKSTEP_PROGRAMS", static_cast<std::uint64_t>(usually)); ++i)
    seeds.push_back(i);
  if (std::getenv("LOCKSTEP_SEED") != nullptr) seeds = {number_in("LOCKSTEP_SEED", 0)};
  DrawnResults results;
  int drawn = 0;
  for (const auto seed : seeds) {
    const auto result = run(seed);
    EXPECT_EQ(result.wrong, "") << "LOCKSTEP_SEED=" << seed << ": " << result.program;
    if (seeds.size() == 1) std::cout << "  " << result.program << "\n";
    if (result.refused && std::getenv("LOCKSTEP_SHOW_REFUSED") != nullptr)
      std::cout << seed << ": " << *result.refused << "\n";
    if (const auto known = expected.find(seed); known != expected.end()) {
      EXPECT_EQ(result.refused.has_value(), known->second == KeptSeed::Ends::refused)
          << "LOCKSTEP_SEED=" << seed << ", which is kept, ends otherwise: " << result.refused.value_or("trained")
          << "\n"
          << result.program;
    } else {
      results.add(result);
      ++drawn;
    }
  }
  results.print(drawn);
  if (drawn > 10) {
    EXPECT_LE(results.refused(), most_refused * drawn);
  }
}

}  // namespace lockstep
