#include "train/layers/stack.h"

#include <map>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/train/model.h"
#include "train/layers/fusion.h"

namespace lockstep {

train::StackModule::StackModule(const std::vector<Layer>& layers, Tensor input) {
  const at::NoGradGuard no_grad;
  std::map<std::string, int> made;
  std::vector<BuiltLayer> built_layers;
  for (const auto& layer : layers) {
    const auto kind = layer.spec().kind();
    const int number = made[kind]++;
    const auto name = number == 0 ? kind : text(kind, "_", number);
    try {
      auto built = layer.spec().build(input);
      std::int64_t parameters = 0;
      if (built.module != nullptr) {
        register_module(name, built.module);
        for (const auto& parameter : built.module->parameters()) parameters += parameter.numel();
        for (const auto& buffer : built.module->buffers())
          parameters += buffer.is_floating_point() ? buffer.numel() : 0;
        if (input.is_floating_point()) built.module->to(input.scalar_type());
        built.module->eval();
      }
      input = built.forward(input);
      if (built.module != nullptr) built.module->train();
      lines_.push_back({name, kind, input.sizes().slice(1).vec(), parameters});
      built_layers.push_back(std::move(built));
    } catch (const c10::Error& error) {
      throw InvalidArgument(text("layer ", name, " cannot take inputs of shape ", input.sizes(),
                                 " (a batch of one): ", error.what_without_backtrace()));
    }
  }
  for (std::size_t i = 0; i < layers.size();) {
    auto fused = train::fuse(layers, built_layers, i);
    auto& piece = pieces_.emplace_back(Piece{std::move(fused.forward), {}});
    for (const auto end = i + fused.layers; i < end; ++i) {
      if (built_layers[i].module != nullptr) piece.modules.emplace_back(lines_[i].name, built_layers[i].module);
    }
  }
}

Tensor train::StackModule::forward(Tensor x) const {
  for (const auto& piece : pieces_) x = piece.forward(x);
  return x;
}

namespace {

// One piece, with its modules under their names in the stack.
struct PieceModule : torch::nn::Module {
  explicit PieceModule(const train::StackModule::Piece& piece) : forward_of(piece.forward) {
    for (const auto& [name, module] : piece.modules) register_module(name, module);
  }
  Tensor forward(const Tensor& x) { return forward_of(x); }

  std::function<Tensor(const Tensor&)> forward_of;
};

}  // namespace

parallel::Layers train::pieces_of(const std::vector<Layer>& layers, const Example& sample) {
  const StackModule stack(layers, at::zeros_like(sample.x.slice(0, 0, 1)));
  parallel::Layers result{.numbered = false};
  for (const auto& piece : stack.pieces()) {
    result.layers.emplace_back([piece] { return std::make_shared<PieceModule>(piece); });
  }
  return result;
}

namespace {

class NestedSpec final : public LayerSpec {
 public:
  explicit NestedSpec(std::vector<Layer> layers) : layers_(std::move(layers)) {}
  std::string kind() const override { return "sequential"; }
  BuiltLayer build(const Tensor& input) const override {
    auto module = std::make_shared<train::StackModule>(layers_, input);
    return {module, [module](const Tensor& x) { return module->forward(x); }};
  }

 private:
  std::vector<Layer> layers_;
};

}  // namespace

Layer::Layer(const Sequential& nested) : spec_(std::make_shared<NestedSpec>(nested.layers())) {}

}  // namespace lockstep
