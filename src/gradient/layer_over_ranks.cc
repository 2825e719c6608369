#include "gradient/layer_over_ranks.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/text.h"
#include "gradient/tensor_map.h"
#include "lockstep/base/error.h"

namespace lockstep::gradient {
namespace {

// Tensors are held by weak references, so that no other tensor gets the address of a remembered one.
struct KnownLayer {
  WeakTensor tensor;
  std::shared_ptr<LayerOverRanks> layer;
};

TensorMap<KnownLayer>& known_layers() {
  static TensorMap<KnownLayer> layers;
  return layers;
}

std::optional<double> if_known(double weight) { return std::isnan(weight) ? std::nullopt : std::optional(weight); }

}  // namespace

LayerOverRanks::LayerOverRanks(const std::shared_ptr<torch::nn::Module>& module, std::string name,
                               std::shared_ptr<const Group> group)
    : module_(module), name_(std::move(name)), group_(std::move(group)) {}

// As PyTorch's: in eval() a layer without running statistics normalizes each rank's batch by itself.
bool LayerOverRanks::trains() const {
  const auto alive = module_.lock();
  return alive == nullptr || alive->is_training();
}

std::optional<double> LayerOverRanks::weight() const { return if_known(weight_); }
std::optional<double> LayerOverRanks::counted() const { return if_known(counted_); }

void add_layer_over_ranks(const at::Tensor& tensor, std::shared_ptr<LayerOverRanks> layer) {
  known_layers().erase_if([](const KnownLayer& known) { return known.tensor.expired(); });
  known_layers().set(tensor, {WeakTensor(tensor), std::move(layer)});
}

std::shared_ptr<LayerOverRanks> layer_over_ranks_of(const at::Tensor& tensor) {
  const auto known = known_layers().find(tensor);
  return known ? known->layer : nullptr;
}

std::vector<std::shared_ptr<LayerOverRanks>> layers_over_ranks(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<LayerOverRanks>> layers;
  if (known_layers().empty()) return layers;
  const auto add = [&](const std::vector<at::Tensor>& tensors) {
    for (const auto& tensor : tensors) {
      auto layer = tensor.defined() ? layer_over_ranks_of(tensor) : nullptr;
      if (layer == nullptr || layer->group().size() == 1) continue;
      if (std::ranges::find(layers, layer) == layers.end()) layers.push_back(std::move(layer));
    }
  };
  add(module.parameters());
  add(module.buffers());
  return layers;
}

bool trains_over_ranks(const torch::nn::Module& module) {
  const auto layers = layers_over_ranks(module);
  return std::ranges::any_of(layers, [](const auto& layer) { return layer->trains(); });
}

void require_no_layers_over_ranks(const torch::nn::Module& module) {
  const auto layers = layers_over_ranks(module);
  if (layers.empty()) return;
  throw InvalidArgument(text("the batch normalization \"", layers[0]->name(), "\" is over ", layers[0]->group().size(),
                             " ranks (convert_sync_batchnorm), which must call it together, and a strategy's replicas "
                             "may have no examples: leave it as it was, or train the module in a loop of your own, "
                             "with DistributedDataParallel, fully_shard or Pipeline"));
}

}  // namespace lockstep::gradient
