// Dense, Embedding, Dropout, ModuleLayer.
#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>

#include "lockstep/ops/ops.h"
#include "train/layers/specs.h"

namespace lockstep {

std::shared_ptr<const LayerSpec> train::spec_of(std::string kind,
                                                std::function<BuiltLayer(const Tensor& input)> build) {
  class Spec final : public LayerSpec {
   public:
    Spec(std::string name, std::function<BuiltLayer(const Tensor& input)> function)
        : kind_(std::move(name)), build_(std::move(function)) {}
    std::string kind() const override { return kind_; }
    BuiltLayer build(const Tensor& input) const override { return build_(input); }

   private:
    std::string kind_;
    std::function<BuiltLayer(const Tensor& input)> build_;
  };
  return std::make_shared<Spec>(std::move(kind), std::move(build));
}

Dense::Dense(std::int64_t units, DenseOptions options)
    : Layer(train::spec_of("dense", [units, options = std::move(options)](const Tensor& input) -> BuiltLayer {
        if (input.dim() < 2) {
          throw InvalidArgument(
              text("Dense: the input has shape ", input.sizes(), "; it must be [batch, ..., features]"));
        }
        auto module = std::make_shared<train::ParameterModule>();
        module->weight = module->make("weight", {units, input.size(-1)}, options.kernel_initializer);
        module->bias = module->make("bias", {units}, options.bias_initializer, options.use_bias);
        if (options.activation.name() == "relu") {
          return {module, [module](const Tensor& x) { return ops::linear_relu(x, module->weight, module->bias); }};
        }
        return {module, [module, activation = options.activation](const Tensor& x) {
                  return activation(at::linear(x, module->weight, module->bias));
                }};
      })) {
  train::require_positive("Dense: units", units);
}

Embedding::Embedding(std::int64_t input_dim, std::int64_t output_dim, EmbeddingOptions options)
    : Layer(train::spec_of("embedding", [=](const Tensor&) -> BuiltLayer {
        // This is LibTorch's module, which parallelize_module knows.
        auto weight = at::empty({input_dim, output_dim});
        options.embeddings_initializer.fill(weight);
        const auto module = std::make_shared<torch::nn::EmbeddingImpl>(
            torch::nn::EmbeddingOptions(input_dim, output_dim)._weight(weight));
        return {module, [module](const Tensor& x) { return at::embedding(module->weight, x.to(at::kLong)); }};
      })) {
  train::require_positive("Embedding: input_dim", input_dim);
  train::require_positive("Embedding: output_dim", output_dim);
}

Dropout::Dropout(double rate)
    : Layer(train::spec_of("dropout", [rate](const Tensor&) -> BuiltLayer {
        auto module = std::make_shared<train::ParameterModule>();  // its mode says whether the layer trains
        return {module, [module, rate](const Tensor& x) { return at::dropout(x, rate, module->is_training()); }};
      })) {
  require(rate >= 0 && rate <= 1, "Dropout: rate", rate, "from 0 to 1");
}

ModuleLayer::ModuleLayer(internal::MakeModule make, internal::ForwardOfModule forward, std::string kind)
    : Layer(train::spec_of(std::move(kind), [make = std::move(make), forward = std::move(forward)](const Tensor&) {
        const auto module = make();
        return BuiltLayer{module, [module, forward](const Tensor& x) { return forward(*module, x); }};
      })) {}

}  // namespace lockstep
