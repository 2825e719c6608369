#include "train/layers/stack.h"

#include <map>
#include <optional>
#include <set>

#include "base/text.h"
#include "checkpoint/state.h"
#include "data/stored_tensor.h"
#include "lockstep/base/error.h"
#include "lockstep/ops/ops.h"
#include "lockstep/train/model.h"
#include "train/layers/specs.h"
#include "train/model_impl.h"

namespace lockstep::train {

namespace {

bool is(const Size2D& size, std::int64_t both) { return size.height == both && size.width == both; }

// Returns the layer's spec, where it is a T.
template <class T>
const T* as(const std::vector<Layer>& layers, std::size_t i) {
  return i < layers.size() ? dynamic_cast<const T*>(&layers[i].spec()) : nullptr;
}

bool relu_of_plain_convolution(const Conv2DSpec& conv) {
  return conv.options().activation.name() == "relu" && conv.options().groups == 1 && is(conv.window().strides, 1) &&
         is(conv.window().dilation, 1);
}

bool max_pooling_by_two(const PoolingSpec& pool) {
  return pool.kind() == "max_pooling2d" && pool.padding() == "valid" && is(pool.window().size, 2) &&
         is(pool.window().strides, 2);
}

// Computes `layers[i]` together with the layers after it that share one operator with it. `built` are the layers,
// built, in their order.
StackModule::Piece fuse(const std::vector<Layer>& layers, const std::vector<BuiltLayer>& built, std::size_t i) {
  const auto* conv = as<Conv2DSpec>(layers, i);
  const auto* pool = as<PoolingSpec>(layers, i + 1);
  if (conv != nullptr && pool != nullptr && relu_of_plain_convolution(*conv) && max_pooling_by_two(*pool)) {
    const auto module = std::static_pointer_cast<ParameterModule>(built[i].module);
    return {[module, window = conv->window(), padding = conv->options().padding](const Tensor& x) {
              auto zeros = padding_of(padding, x, window);
              const auto image = pad_unevenly(x, zeros);
              return ops::conv2d_relu_max_pool2d(image, module->weight, module->bias, zeros.before());
            },
            2};
  }
  return {built[i].forward};
}

}  // namespace
}  // namespace lockstep::train

namespace lockstep {

namespace {

// The layers that were made for a model, or for a replica of one, so that each is made once. A stack within another one
// uses the outer stack's.
class MadeLayers {
 public:
  struct Made {
    BuiltLayer built;
    std::string name;
    const void* stack = nullptr;  // the stack that registered its module
  };

  MadeLayers() : outer_(current) {
    if (current == nullptr) current = this;
  }
  ~MadeLayers() { current = outer_; }
  MadeLayers(const MadeLayers&) = delete;
  MadeLayers& operator=(const MadeLayers&) = delete;

  static std::map<const internal::LayerUse*, Made>& all() { return current->all_; }

 private:
  static thread_local MadeLayers* current;
  MadeLayers* const outer_;
  std::map<const internal::LayerUse*, Made> all_;
};

thread_local MadeLayers* MadeLayers::current = nullptr;

std::int64_t count_parameters(const torch::nn::Module& module) {
  std::int64_t count = 0;
  for (const auto& parameter : module.parameters()) count += parameter.numel();
  for (const auto& buffer : module.buffers()) count += buffer.is_floating_point() ? buffer.numel() : 0;
  return count;
}

}  // namespace

train::StackModule::StackModule(const std::vector<Layer>& layers, Tensor input) {
  const at::NoGradGuard no_grad;
  const MadeLayers made_layers;
  std::map<std::string, int> made;
  std::vector<BuiltLayer> built_layers;
  for (const auto& layer : layers) {
    const auto kind = layer.spec().kind();
    const auto known = MadeLayers::all().find(&internal::LayerUse::of(layer));
    const bool again = known != MadeLayers::all().end();
    const bool here = again && known->second.stack == this;
    const int number = here ? 0 : made[kind]++;
    const auto name = here ? known->second.name : number == 0 ? kind : text(kind, "_", number);
    try {
      auto built = again ? known->second.built : layer.spec().build(input);
      std::int64_t parameters = 0;
      if (built.module != nullptr) {
        if (!here) register_module(name, built.module);
        if (!again) parameters = count_parameters(*built.module);
        if (!again && input.is_floating_point()) built.module->to(input.scalar_type());
        built.module->eval();
      }
      input = built.forward(input);
      if (built.module != nullptr) built.module->train();
      lines_.push_back({name, kind, input.sizes().slice(1).vec(), parameters});
      if (!again) MadeLayers::all()[&internal::LayerUse::of(layer)] = {built, name, this};
      built_layers.push_back(std::move(built));
    } catch (const c10::Error& error) {
      throw InvalidArgument(text("layer ", name, " cannot take inputs of shape ", input.sizes(), " (a batch of one",
                                 again ? "; a layer that comes again has the weights that it was made with" : "",
                                 "): ", error.what_without_backtrace()));
    }
  }
  for (std::size_t i = 0; i < layers.size();) {
    auto& piece = pieces_.emplace_back(train::fuse(layers, built_layers, i));
    for (const auto end = i + piece.layers; i < end; ++i) {
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

train::Layers train::pieces_of(const std::vector<Layer>& layers, const Example& sample) {
  const StackModule stack(layers, at::zeros_like(sample.x.slice(0, 0, 1)));
  Layers result{.numbered = false};
  std::set<const torch::nn::Module*> seen;
  for (const auto& piece : stack.pieces()) {
    for (const auto& [name, module] : piece.modules) {
      if (seen.insert(module.get()).second) continue;
      throw InvalidArgument(text("Sequential: layer ", name,
                                 " comes twice, and a model that is cut into stages has each ", "layer in one stage"));
    }
  }
  for (const auto& piece : stack.pieces()) {
    result.layers.emplace_back([piece] { return std::make_shared<PieceModule>(piece); });
  }
  return result;
}

namespace {

class NestedSpec final : public LayerSpec {
 public:
  NestedSpec(std::vector<Layer> layers, std::optional<Archive> first_values)
      : layers_(std::move(layers)), first_values_(std::move(first_values)) {}
  std::string kind() const override { return "sequential"; }
  BuiltLayer build(const Tensor& input) const override {
    auto module = std::make_shared<train::StackModule>(layers_, input);
    if (first_values_) load(*module);
    return {module, [module](const Tensor& x) { return module->forward(x); }};
  }
  const std::vector<Layer>& layers() const { return layers_; }

 private:
  void load(const torch::nn::Module& module) const {
    auto values = module.named_parameters();
    for (const auto& buffer : module.named_buffers()) values.insert(buffer.key(), buffer.value());
    for (const auto& [name, tensor] : first_values_->tensors) {
      if (values.contains(name)) continue;
      throw InvalidArgument(
          text("Layer: the nested Sequential has weights \"", name, "\", which none of its layers has"));
    }
    for (const auto& value : values) {
      const auto found = first_values_->tensors.find(value.key());
      if (found == first_values_->tensors.end()) continue;  // a second name of a parameter
      const auto loaded = data::from_stored(found->second);
      if (loaded.sizes() != value.value().sizes()) {
        throw InvalidArgument(text("Layer: the nested Sequential has weights \"", value.key(), "\" of shape ",
                                   loaded.sizes(), ", and the inputs that it gets here need ", value.value().sizes()));
      }
      value.value().copy_(loaded);
    }
  }

  std::vector<Layer> layers_;
  std::optional<Archive> first_values_;
};

// Calls act(layer) for each layer and those within it.
template <class Act>
void for_each_layer(const std::vector<Layer>& layers, const Act& act) {
  for (const auto& layer : layers) {
    act(layer);
    if (const auto* const nested = dynamic_cast<const NestedSpec*>(&layer.spec()))
      for_each_layer(nested->layers(), act);
  }
}

std::shared_ptr<const LayerSpec> nested_spec(const Sequential& nested) {
  const auto& impl = unwrap(nested);
  std::optional<Archive> first_values;
  if (impl.state.pending_weights) {
    const auto& [archive, options] = *impl.state.pending_weights;
    if (options.skip_mismatch || options.by_name) {
      throw InvalidArgument("Layer: the nested Sequential was given weights by name, or such as fit: build it first");
    }
    first_values = archive;
  }
  if (impl.parameters != nullptr) first_values = impl.state.from_chief(checkpoint::archive_of(impl.state.weights()));
  return std::make_shared<NestedSpec>(nested.layers(), std::move(first_values));
}

}  // namespace

void train::require_free(const std::vector<Layer>& layers, std::int64_t model) {
  for_each_layer(layers, [model](const Layer& layer) {
    const auto owner = internal::LayerUse::of(layer).model.load();
    if (owner == 0 || owner == model) return;
    throw InvalidArgument(text("Sequential: a layer of kind ", layer.spec().kind(), " is part of another model, which ",
                               "has its weights: make the layer anew, or nest that model as a whole: Layer(model)"));
  });
}

void train::give_to(const std::vector<Layer>& layers, std::int64_t model) {
  for_each_layer(layers, [model](const Layer& layer) { internal::LayerUse::of(layer).model = model; });
}

Layer::Layer(std::shared_ptr<const LayerSpec> spec)
    : spec_(std::move(spec)), use_(std::make_shared<internal::LayerUse>()) {
  if (spec_ == nullptr) throw InvalidArgument("Layer: the description is null");
}

Layer::Layer(const Sequential& nested) {
  auto& impl = unwrap(nested);
  if (!impl.definition.as_layer) {
    impl.definition.as_layer.emplace(nested_spec(nested));
    train::give_to(nested.layers(), 0);
  }
  *this = *impl.definition.as_layer;
}

}  // namespace lockstep
