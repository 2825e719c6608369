// Dense, Embedding, Dropout.
#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>

#include "lockstep/ops/ops.h"
#include "train/layers/specs.h"

namespace lockstep {
namespace {

class DenseSpec final : public LayerSpec {
 public:
  DenseSpec(std::int64_t units, DenseOptions options) : units_(units), options_(std::move(options)) {
    train::require_positive("Dense: units", units);
  }
  std::string kind() const override { return "dense"; }
  BuiltLayer build(const Tensor& input) const override {
    if (input.dim() < 2)
      throw InvalidArgument(text("Dense: the input has shape ", input.sizes(), "; it must be [batch, ..., features]"));
    auto module = std::make_shared<train::ParameterModule>();
    module->weight = module->make("weight", {units_, input.size(-1)}, options_.kernel_initializer);
    module->bias = module->make("bias", {units_}, options_.bias_initializer, options_.use_bias);
    if (options_.activation.name() == "relu") {
      return {module, [module](const Tensor& x) { return ops::linear_relu(x, module->weight, module->bias); }};
    }
    return {module, [module, activation = options_.activation](const Tensor& x) {
              return activation(at::linear(x, module->weight, module->bias));
            }};
  }

 private:
  std::int64_t units_;
  DenseOptions options_;
};

class EmbeddingSpec final : public LayerSpec {
 public:
  EmbeddingSpec(std::int64_t input_dim, std::int64_t output_dim, EmbeddingOptions options)
      : input_dim_(input_dim), output_dim_(output_dim), options_(std::move(options)) {
    train::require_positive("Embedding: input_dim", input_dim);
    train::require_positive("Embedding: output_dim", output_dim);
  }
  std::string kind() const override { return "embedding"; }
  BuiltLayer build(const Tensor&) const override {
    // This is LibTorch's module, which parallelize_module knows.
    auto weight = at::empty({input_dim_, output_dim_});
    options_.embeddings_initializer.fill(weight);
    const auto module = std::make_shared<torch::nn::EmbeddingImpl>(
        torch::nn::EmbeddingOptions(input_dim_, output_dim_)._weight(weight));
    return {module, [module](const Tensor& x) { return at::embedding(module->weight, x.to(at::kLong)); }};
  }

 private:
  std::int64_t input_dim_, output_dim_;
  EmbeddingOptions options_;
};

class DropoutSpec final : public LayerSpec {
 public:
  explicit DropoutSpec(double rate) : rate_(rate) {
    if (!(rate >= 0 && rate <= 1)) throw InvalidArgument(text("Dropout: rate is ", rate, "; it must be from 0 to 1"));
  }
  std::string kind() const override { return "dropout"; }
  BuiltLayer build(const Tensor&) const override {
    auto module = std::make_shared<train::ParameterModule>();  // its mode says whether the layer trains
    return {module, [module, rate = rate_](const Tensor& x) { return at::dropout(x, rate, module->is_training()); }};
  }

 private:
  double rate_;
};

class ModuleSpec final : public LayerSpec {
 public:
  ModuleSpec(internal::MakeModule make, internal::ForwardOfModule forward, std::string kind)
      : make_(std::move(make)), forward_(std::move(forward)), kind_(std::move(kind)) {}
  std::string kind() const override { return kind_; }
  BuiltLayer build(const Tensor&) const override {
    const auto module = make_();
    return {module, [module, forward = forward_](const Tensor& x) { return forward(*module, x); }};
  }

 private:
  internal::MakeModule make_;
  internal::ForwardOfModule forward_;
  std::string kind_;
};

}  // namespace

Dense::Dense(std::int64_t units, DenseOptions options)
    : Layer(std::make_shared<DenseSpec>(units, std::move(options))) {}
Embedding::Embedding(std::int64_t input_dim, std::int64_t output_dim, EmbeddingOptions options)
    : Layer(std::make_shared<EmbeddingSpec>(input_dim, output_dim, std::move(options))) {}
Dropout::Dropout(double rate) : Layer(std::make_shared<DropoutSpec>(rate)) {}

ModuleLayer::ModuleLayer(internal::MakeModule make, internal::ForwardOfModule forward, std::string kind)
    : Layer(std::make_shared<ModuleSpec>(std::move(make), std::move(forward), std::move(kind))) {}

}  // namespace lockstep
