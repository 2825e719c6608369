#include "gradient/layer_over_ranks.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <utility>

#include "base/mutex.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::gradient {
namespace {

// Tensors are held by weak references, so that no other tensor gets the address of a remembered one.
class KnownLayers {
 public:
  void add(const at::Tensor& tensor, std::shared_ptr<LayerOverRanks> layer) {
    MutexLock lock(mutex_);
    std::erase_if(layers_, [](const auto& entry) { return entry.second.tensor.expired(); });
    layers_.insert_or_assign(tensor.unsafeGetTensorImpl(),
                             Entry{WeakTensor(tensor.getIntrusivePtr()), std::move(layer)});
    any_.store(true, std::memory_order_release);
  }

  bool any() const { return any_.load(std::memory_order_acquire); }

  std::shared_ptr<LayerOverRanks> of(const at::Tensor& tensor) {
    if (!any()) return nullptr;
    MutexLock lock(mutex_);
    const auto found = layers_.find(tensor.unsafeGetTensorImpl());
    return found == layers_.end() ? nullptr : found->second.layer;
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>;
  struct Entry {
    WeakTensor tensor;
    std::shared_ptr<LayerOverRanks> layer;
  };

  std::atomic<bool> any_{false};
  Mutex mutex_;
  std::unordered_map<const at::TensorImpl*, Entry> layers_ LOCKSTEP_GUARDED_BY(mutex_);
};

KnownLayers& known_layers() {
  static KnownLayers layers;
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
  known_layers().add(tensor, std::move(layer));
}

std::shared_ptr<LayerOverRanks> layer_over_ranks_of(const at::Tensor& tensor) { return known_layers().of(tensor); }

std::vector<std::shared_ptr<LayerOverRanks>> layers_over_ranks(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<LayerOverRanks>> layers;
  if (!known_layers().any()) return layers;
  const auto add = [&](const std::vector<at::Tensor>& tensors) {
    for (const auto& tensor : tensors) {
      auto layer = tensor.defined() ? layer_over_ranks_of(tensor) : nullptr;
      if (layer == nullptr || layer->group().size() == 1) continue;
      if (std::find(layers.begin(), layers.end(), layer) == layers.end()) layers.push_back(std::move(layer));
    }
  };
  add(module.parameters());
  add(module.buffers());
  return layers;
}

bool trains_over_ranks(const torch::nn::Module& module) {
  const auto layers = layers_over_ranks(module);
  return std::any_of(layers.begin(), layers.end(), [](const auto& layer) { return layer->trains(); });
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
