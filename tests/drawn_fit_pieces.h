// For tests: what a drawn program of fit trains: a model, its loss, its optimizer, its data.
#pragma once

#include <lockstep/lockstep.h>

#include <algorithm>

#include "tests/drawn_net.h"

namespace lockstep {

// --- the model: a module of LibTorch, or a Sequential

enum class Piece { dense, twice, nested, layer_norm, batch_norm, dropout, module, activation };

struct DrawnModel {
  std::optional<NetOptions> net;  // else the pieces
  std::vector<Piece> pieces;
  bool embedding = false, images = false, tokens = false;  // of the Sequential; else float positions
  static constexpr std::int64_t kClasses = 6, kWidth = 8, kPositions = 4, kFeatures = 5;

  bool of_tokens() const { return net ? net->tokens : tokens; }
  bool ids() const { return net ? net->embedding : embedding; }
  bool normalizes_batches() const {
    if (net) return std::find(net->blocks.begin(), net->blocks.end(), Block::batch_norm) != net->blocks.end();
    return std::find(pieces.begin(), pieces.end(), Piece::batch_norm) != pieces.end();
  }

  Layer layer(Piece piece) const {
    switch (piece) {
      case Piece::dense: return Dense(kWidth, {.activation = "tanh"});
      case Piece::nested: return Layer(Sequential({Dense(kWidth, {.activation = "gelu"}), LayerNormalization()}));
      case Piece::layer_norm: return LayerNormalization();
      case Piece::batch_norm: return BatchNormalization({.momentum = 0.8});
      case Piece::dropout: return Dropout(0);
      case Piece::module: return ModuleLayer([] { return torch::nn::Linear(kWidth, kWidth); });
      default: return Activation("sigmoid");
    }
  }

  std::vector<Layer> layers() const {
    std::vector<Layer> all;
    if (embedding) all.push_back(Embedding(kClasses, kWidth));
    if (images) {
      all.push_back(Conv2D(3, 3, {.padding = "same", .activation = "relu"}));
      all.push_back(MaxPooling2D());
      all.push_back(Flatten());
    }
    if (!embedding) all.push_back(Dense(kWidth));
    for (const auto piece : pieces) {
      if (piece == Piece::twice) {
        const Dense shared(kWidth);
        all.insert(all.end(), {shared, Activation("tanh"), shared});
      } else {
        all.push_back(layer(piece));
      }
    }
    if (!tokens && !images) all.push_back(Flatten());
    all.push_back(Dense(kClasses));
    return all;
  }

  Model make(at::ScalarType dtype) const {
    if (!net) return Sequential(layers());
    auto options = *net;
    options.dtype = dtype;
    return Model([options] { return DrawnNet(options); });
  }

  std::vector<std::int64_t> input_shape() const {
    if (images) return {2, 5, 6};
    return ids() ? std::vector{kPositions} : std::vector{kPositions, kFeatures};
  }

  std::string text() const {
    if (net) return net->text();
    static const char* const names[] = {"dense",      "twice",   "nested", "layer_norm",
                                        "batch_norm", "dropout", "module", "activation"};
    std::vector<std::string> words{"layers", embedding ? "embedding" : images ? "images" : "floats"};
    for (const auto piece : pieces) words.emplace_back(names[static_cast<int>(piece)]);
    if (tokens) words.emplace_back("of tokens");
    return join(words, " ");
  }
};

// --- the loss, on logits

struct DrawnLoss {
  enum Kind { sparse, sparse_last_one, categorical, binary, mse, huber, own } kind = sparse;
  Reduction reduction = Reduction::sum_over_batch_size;

  Loss make() const {
    const CrossentropyOptions of_logits{.from_logits = true, .reduction = reduction};
    switch (kind) {
      case categorical: return CategoricalCrossentropy(of_logits);
      case binary: return BinaryCrossentropy(of_logits);
      case mse: return MeanSquaredError({.reduction = reduction});
      case huber: return Huber({.delta = 0.5, .reduction = reduction});
      case own: return {"own", [](const Tensor& y, const Tensor& out) { return (out - y).pow(4).mean(-1); }, reduction};
      default: return SparseCategoricalCrossentropy(of_logits);
    }
  }
  // The labels of class numbers [examples] or [examples, positions], as the loss takes them.
  Tensor labels(const Tensor& y, at::ScalarType dtype) const {
    if (kind == sparse) return y;
    if (kind == sparse_last_one) return y.unsqueeze(-1);
    return at::one_hot(y, DrawnModel::kClasses).to(dtype);
  }
  // One value for each label, as LibTorch computes them.
  Tensor values(const Tensor& y, const Tensor& out) const {
    const auto target = at::one_hot(y, DrawnModel::kClasses).to(out.scalar_type());
    switch (kind) {
      case binary: return at::binary_cross_entropy_with_logits(out, target, {}, {}, at::Reduction::None).mean(-1);
      case mse: return (out - target).square().mean(-1);
      case huber: return at::huber_loss(out, target, at::Reduction::None, 0.5).mean(-1);
      case own: return (out - target).pow(4).mean(-1);
      default: return -(target * at::log_softmax(out, -1)).sum(-1);
    }
  }
  std::string text() const {
    static const char* const names[] = {"sparse", "sparse [.., 1]", "categorical", "binary", "mse", "huber", "own"};
    static const char* const reductions[] = {"", " sum", " mean by weights"};
    return std::string(names[kind]) + reductions[static_cast<int>(reduction)];
  }
};

// --- the optimizer

struct DrawnOptimizer {
  enum Kind { sgd, adam, adamw, rmsprop, adagrad } kind = sgd;
  double momentum = 0;
  bool nesterov = false, scaled_loss = false, decays = false;
  std::optional<double> clipnorm, clipvalue, global_clipnorm;

  double first_rate() const { return kind == sgd || kind == adagrad ? 0.05 : 0.01; }
  double rate(std::int64_t iteration) const {
    return decays ? first_rate() / (1 + 0.25 * static_cast<double>(iteration)) : first_rate();
  }
  double weight_decay() const { return kind == adamw ? 0.1 : 0; }

  Optimizer inner() const {
    const LearningRate rate =
        decays ? LearningRate([copy = *this](std::int64_t i) { return copy.rate(i); }) : LearningRate(first_rate());
    switch (kind) {
      case adam: return Adam({rate, 0.9, 0.999, 1e-7, false, {}, clipnorm, clipvalue, global_clipnorm});
      case adamw: return AdamW({rate, 0.9, 0.999, 1e-7, false, 0.1, clipnorm, clipvalue, global_clipnorm});
      case rmsprop: return RMSprop({rate, 0.9, 0, 1e-7, false, {}, clipnorm, clipvalue, global_clipnorm});
      case adagrad: return Adagrad({rate, 0.1, 1e-7, {}, clipnorm, clipvalue, global_clipnorm});
      default: return SGD({rate, momentum, nesterov, {}, clipnorm, clipvalue, global_clipnorm});
    }
  }
  Optimizer make() const {
    if (scaled_loss) return LossScaleOptimizer(inner(), {.initial_scale = 64, .dynamic_growth_steps = 3});
    return inner();
  }
  std::string text() const {
    static const char* const names[] = {"sgd", "adam", "adamw", "rmsprop", "adagrad"};
    return lockstep::text(names[kind], momentum > 0 ? " momentum" : "", nesterov ? " nesterov" : "",
                          decays ? " decays" : "", scaled_loss ? " scaled loss" : "", clipnorm ? " clipnorm" : "",
                          clipvalue ? " clipvalue" : "", global_clipnorm ? " global_clipnorm" : "");
  }
};

// --- the data

struct DrawnBatches {
  std::int64_t examples = 20, batch = 5, steps_per_epoch = 0;
  bool weights = false, shuffle = false, drops = false, repeats = false, repeats_examples = false, prefetches = false;
  std::int64_t validation = 0, validation_batch = 4;  // 0: none
  bool class_weight = false;
  std::uint64_t seed = 0;

  // Divides `data` into the batches of training.
  Dataset of(Dataset data) const {
    if (shuffle) data = data.shuffle(7, {.seed = seed});
    if (repeats_examples) data = data.repeat();
    data = data.batch(batch, {.drop_remainder = drops});
    if (repeats) data = data.repeat();
    return prefetches ? data.prefetch(2) : data;
  }
  std::string text() const {
    return lockstep::text(examples, " examples in ", batch, "s", weights ? " weighted" : "",
                          class_weight ? " by class" : "", shuffle ? " shuffled" : "", drops ? " dropping" : "",
                          repeats ? " repeated" : "", repeats_examples ? " repeated before batch" : "",
                          prefetches ? " prefetched" : "", ", ", steps_per_epoch, " steps an epoch, ", validation,
                          " validate in ", validation_batch, "s");
  }
};

}  // namespace lockstep
