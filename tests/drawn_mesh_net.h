// For tests: a net of layers whose code knows nothing of a mesh, drawn by a seed. It has the blocks of drawn_net.h, and
// others that people write with parameters that a mesh divides. A list of layers, which may be cut into stages.
#pragma once

#include <ATen/ops/embedding.h>
#include <ATen/ops/one_hot.h>

#include <set>

#include "drawn_net.h"
#include "lockstep/parallel.h"

namespace lockstep {

enum class Kind {
  linear = static_cast<int>(Block::linear),
  tied = static_cast<int>(Block::tied),
  masked = static_cast<int>(Block::masked),
  shared = static_cast<int>(Block::shared),
  frozen = static_cast<int>(Block::frozen),
  frozen_weight = static_cast<int>(Block::frozen_weight),
  layer_norm = static_cast<int>(Block::layer_norm),
  batch_norm = static_cast<int>(Block::batch_norm),
  attention = static_cast<int>(Block::attention),
  unused = static_cast<int>(Block::unused),
  feed_forward = 100,
  multi_query,
  lora,         // weight + b a
  weight_norm,  // g weight / |weight|
  einsum,
  experts
};

inline const char* name_of(Kind kind) {
  static const std::map<Kind, const char*> names{{Kind::linear, "linear"},
                                                 {Kind::tied, "tied"},
                                                 {Kind::masked, "masked"},
                                                 {Kind::shared, "shared"},
                                                 {Kind::frozen, "frozen"},
                                                 {Kind::frozen_weight, "frozen_weight"},
                                                 {Kind::layer_norm, "layer_norm"},
                                                 {Kind::batch_norm, "batch_norm"},
                                                 {Kind::attention, "attention"},
                                                 {Kind::unused, "unused"},
                                                 {Kind::feed_forward, "feed_forward"},
                                                 {Kind::multi_query, "multi_query"},
                                                 {Kind::lora, "lora"},
                                                 {Kind::weight_norm, "weight_norm"},
                                                 {Kind::einsum, "einsum"},
                                                 {Kind::experts, "experts"}};
  return names.at(kind);
}

enum class Tie { none, linear, product, assigned };  // how the head uses the embedding's weight

struct MeshNetOptions {
  std::vector<Kind> layers;  // between the front and the head
  bool embedding = false, places = false, tokens = false, recompute = false, freeze_front = false;
  Tie tie = Tie::none;
  at::ScalarType dtype = at::kDouble;
  std::int64_t width = 12, heads = 6, positions = 6, features = 6, classes = 12;  // what 2 and 3 ranks divide
  int experts = 6, top_k = 2;
  std::uint64_t seed = 0;

  int count() const { return static_cast<int>(layers.size()) + 2; }
  NetOptions of_block() const { return {.dtype = dtype, .width = width, .heads = heads, .positions = positions}; }
  std::string text() const {
    static const char* const ties[] = {"head", "head tied by linear", "head tied by matmul", "head tied by assignment"};
    std::vector<std::string> words{toString(dtype), lockstep::text("width ", width),
                                   lockstep::text(freeze_front ? "frozen " : "", embedding ? "embedding" : "floats")};
    if (places) words.emplace_back("places");
    for (const auto kind : layers) words.emplace_back(name_of(kind));
    words.emplace_back(ties[static_cast<int>(tie)]);
    if (tokens) words.emplace_back("of tokens");
    if (recompute) words.emplace_back("recomputed");
    return join(words, " ");
  }
};

struct ExpertNetImpl : torch::nn::Module {
  explicit ExpertNetImpl(std::int64_t width)
      : up(register_module("up", torch::nn::Linear(width, width + 1))),
        down(register_module("down", torch::nn::Linear(width + 1, width))) {}
  at::Tensor forward(const at::Tensor& x) { return down(at::tanh(up(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(ExpertNet);

// Mixture of experts in plain LibTorch: each expert computes all tokens.
struct PlainExpertsImpl : torch::nn::Module {
  PlainExpertsImpl(int count, int top_k_, std::int64_t width) : top_k(top_k_) {
    gate = register_parameter("gate", torch::empty({count, width}));
    for (int i = 0; i < count; ++i) all.push_back(register_module(text("expert", i), ExpertNet(width)));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto tokens = x.reshape({-1, x.size(-1)});
    const auto probabilities = at::linear(tokens, gate).softmax(-1);
    auto [weights, chosen] = probabilities.topk(top_k, -1);
    if (top_k > 1) weights = weights / weights.sum(-1, true);
    auto y = at::zeros_like(tokens);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto share = (weights * (chosen == static_cast<std::int64_t>(i))).sum(-1, true);
      y = y + share * all[i](tokens);
    }
    const auto first = at::one_hot(chosen.select(-1, 0), static_cast<std::int64_t>(all.size())).to(x.scalar_type());
    balance = static_cast<double>(all.size()) * (first.mean(0) * probabilities.mean(0)).sum();
    return y.view(x.sizes());
  }
  const int top_k;
  at::Tensor gate, balance;
  std::vector<ExpertNet> all;
};
TORCH_MODULE(PlainExperts);

// A layer between front and head, [examples, positions, width] to the same.
struct MeshBlockImpl : torch::nn::Module {
  // `experts`: of the mesh; null: plain LibTorch.
  MeshBlockImpl(const MeshNetOptions& options, Kind kind_, const Communicator* ranks) : kind(kind_) {
    const auto width = options.width, head = width / options.heads;
    const auto linear = [&](const char* name, std::int64_t in, std::int64_t out) {
      return register_module(name, torch::nn::Linear(in, out));
    };
    head_size = head;
    if (kind == Kind::feed_forward) {
      first = linear("up", width, 2 * width);
      second = linear("down", 2 * width, width);
    } else if (kind == Kind::multi_query) {
      first = linear("q", width, width);
      k = linear("k", width, head);
      v = linear("v", width, head);
      second = linear("out", width, width);
    } else if (kind == Kind::experts) {
      if (ranks == nullptr) {
        plain = register_module("moe", PlainExperts(options.experts, options.top_k, width));
      } else {
        const MoEOptions moe_options{.experts = options.experts, .top_k = options.top_k};
        moe = register_module("moe", MoE(
                                         moe_options, width, [=] { return ExpertNet(width); }, *ranks));
      }
    } else {
      first = linear("first", width, width);
      if (kind == Kind::lora) {
        a = register_parameter("a", torch::empty({2, width}));
        b = register_parameter("b", torch::empty({width, 2}));
        first->weight.set_requires_grad(false);
      }
      if (kind == Kind::weight_norm) a = register_parameter("gain", torch::empty({width, 1}));
    }
  }

  at::Tensor forward(const at::Tensor& x) {
    switch (kind) {
      case Kind::feed_forward: return x + second(at::tanh(first(x)));
      case Kind::multi_query: {
        const auto queries = first(x).unflatten(-1, {-1, head_size}).transpose(1, 2);
        const auto shared = [&](const at::Tensor& of) { return of.unsqueeze(1).expand_as(queries); };
        const auto attended = at::scaled_dot_product_attention(queries, shared(k(x)), shared(v(x)));
        return x + second(attended.transpose(1, 2).flatten(2));
      }
      case Kind::lora: return x + at::tanh(at::linear(x, first->weight + b.mm(a), first->bias));
      case Kind::weight_norm:
        return x + at::tanh(at::linear(x, a * first->weight / first->weight.norm(2, {1}, true), first->bias));
      case Kind::einsum: return x + at::tanh(at::einsum("bpd,vd->bpv", {x, first->weight}) + first->bias);
      default: return x + (plain ? plain(x) : moe(x));
    }
  }

  const Kind kind;
  std::int64_t head_size = 0;
  torch::nn::Linear first = nullptr, second = nullptr, k = nullptr, v = nullptr;
  at::Tensor a, b;
  PlainExperts plain = nullptr;
  MoE moe = nullptr;
};
TORCH_MODULE(MeshBlock);

struct MeshFrontImpl : torch::nn::Module {
  explicit MeshFrontImpl(const MeshNetOptions& options) {
    if (options.embedding) {
      token = register_module("token", torch::nn::Embedding(options.classes, options.width));
    } else {
      front = register_module("front", torch::nn::Linear(options.features, options.width));
    }
    if (options.places) place = register_module("place", torch::nn::Embedding(options.positions, options.width));
    for (const auto& each : parameters()) each.set_requires_grad(!options.freeze_front);
  }
  at::Tensor forward(const at::Tensor& input) {
    const auto x = token ? token(input) : front(input);
    return place ? x + place(at::arange(input.size(1), at::kLong)) : x;
  }
  torch::nn::Embedding token = nullptr, place = nullptr;
  torch::nn::Linear front = nullptr;
};
TORCH_MODULE(MeshFront);

struct MeshHeadImpl : torch::nn::Module {
  MeshHeadImpl(const MeshNetOptions& options, const at::Tensor& shared_) : tokens(options.tokens) {
    tie = shared_.defined() ? options.tie : Tie::none;
    if (tie == Tie::none || tie == Tie::assigned) {
      const bool has_bias = options.tie == Tie::none || options.tie == Tie::assigned;
      const auto linear = torch::nn::LinearOptions(options.width, options.classes).bias(has_bias);
      head = register_module("head", torch::nn::Linear(linear));
      if (tie == Tie::assigned) head->weight = shared_;
      if (options.tie != Tie::none && options.freeze_front) head->weight.set_requires_grad(false);
    } else {
      shared = shared_;
    }
  }
  at::Tensor forward(const at::Tensor& input) {
    const auto x = tokens ? input : input.mean(1);
    if (tie == Tie::linear) return at::linear(x, shared);
    return tie == Tie::product ? at::matmul(x, shared.t()) : head(x);
  }
  const bool tokens;
  Tie tie = Tie::none;
  torch::nn::Linear head = nullptr;
  at::Tensor shared;
};
TORCH_MODULE(MeshHead);

// Sets values that are the same wherever a layer is made, by its name in the whole net.
inline void set_values(torch::nn::Module& module, const MeshNetOptions& options, const std::string& prefix = "") {
  module.to(at::kDouble);
  const torch::NoGradGuard no_grad;
  for (const auto& each : module.named_parameters()) {
    std::uint64_t hash = options.seed;
    for (const char c : prefix + each.key()) hash = hash * 131 + static_cast<unsigned char>(c);
    auto generator = at::detail::createCPUGenerator(hash);
    const bool scale = each.key().ends_with("norm.weight") || each.key().ends_with("gain");
    each.value().normal_(scale ? 1 : 0, 0.3, generator);
  }
  module.to(options.dtype);
}

// The layers `begin` to `end`, by their numbers: "0.token.weight".
struct MeshNetImpl : torch::nn::Module {
  MeshNetImpl(const MeshNetOptions& options, int begin, int end, const Communicator* experts = nullptr)
      : again(options.recompute && experts != nullptr) {
    at::Tensor token;
    for (int i = begin; i < end; ++i) {
      const auto name = std::to_string(i);
      if (i == 0) {
        const auto front = register_module(name, MeshFront(options));
        if (front->token) token = front->token->weight;
        layers.emplace_back([front](const at::Tensor& x) { return front->forward(x); });
      } else if (i + 1 == options.count()) {
        const auto head = register_module(name, MeshHead(options, options.tie == Tie::none ? at::Tensor() : token));
        layers.emplace_back([head](const at::Tensor& x) { return head->forward(x); });
      } else if (const auto kind = options.layers[static_cast<std::size_t>(i - 1)]; kind < Kind::feed_forward) {
        add(register_module(name, DrawnBlock(options.of_block(), static_cast<Block>(kind))));
      } else {
        add(blocks.emplace_back(register_module(name, MeshBlock(options, kind, experts))));
      }
    }
    set_values(*this, options);
  }

  template <class Layer>
  void add(Layer layer) {
    layers.emplace_back(
        [layer, on = again](const at::Tensor& x) mutable { return on ? recompute(layer, x) : layer->forward(x); });
  }

  at::Tensor forward(const at::Tensor& input) {
    auto x = input;
    for (const auto& layer : layers) x = layer(x);
    return x;
  }

  // The balance loss of all experts; undefined where there are none.
  at::Tensor balance() const {
    at::Tensor sum;
    for (const auto& block : blocks) {
      if (block->kind != Kind::experts) continue;
      const auto of = block->plain ? block->plain->balance : block->moe->balance_loss();
      sum = sum.defined() ? sum + of : of;
    }
    return sum;
  }

  const bool again;
  std::vector<std::function<at::Tensor(const at::Tensor&)>> layers;
  std::vector<MeshBlock> blocks;
};
TORCH_MODULE(MeshNet);

// The parameters that are trained, tied ones once.
inline std::vector<at::Tensor> trained_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> all;
  std::set<const at::TensorImpl*> seen;
  for (const auto& each : parameters) {
    if (each.requires_grad() && seen.insert(each.unsafeGetTensorImpl()).second) all.push_back(each);
  }
  return all;
}

inline DrawnData make_mesh_data(const MeshNetOptions& net, std::int64_t examples, std::uint64_t seed) {
  return make_drawn_data({.embedding = net.embedding,
                          .tokens = net.tokens,
                          .dtype = net.dtype,
                          .positions = net.positions,
                          .features = net.features,
                          .classes = net.classes},
                         examples, seed);
}

}  // namespace lockstep
