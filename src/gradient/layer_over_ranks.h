// Layers that compute over the examples of several ranks, such as a synchronized batch normalization.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/collective/group.h"

namespace torch::nn {
class Module;
}

namespace lockstep::gradient {

// All ranks of the layer's Group call it together, in forward and in backward, while it trains. Any thread.
class LayerOverRanks {
 public:
  LayerOverRanks(const std::shared_ptr<torch::nn::Module>& module, std::string name,
                 std::shared_ptr<const Group> group);
  virtual ~LayerOverRanks() = default;
  LayerOverRanks(const LayerOverRanks&) = delete;
  LayerOverRanks& operator=(const LayerOverRanks&) = delete;

  const std::string& name() const { return name_; }  // within the module that was given the ranks
  const Group& group() const { return *group_; }
  bool trains() const;

  // This rank's gradients count for so much in backwards that no BackwardWeights knows. Empty: for the examples of the
  // forward. A pipeline sets the examples of its whole batch, which has several forwards.
  std::optional<double> weight() const;
  void set_weight(std::optional<double> weight) { weight_ = weight.value_or(kUnknown); }

  // The gradients counted for so much in the last such backward; empty before one.
  std::optional<double> counted() const;
  void set_counted(double weight) const { counted_ = weight; }

 private:
  static constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

  const std::weak_ptr<torch::nn::Module> module_;
  const std::string name_;
  const std::shared_ptr<const Group> group_;
  std::atomic<double> weight_ = kUnknown;
  mutable std::atomic<double> counted_ = kUnknown;
};

// Layers are known by their parameters and buffers, which a module keeps when it is moved or loaded.
void add_layer_over_ranks(const at::Tensor& tensor, std::shared_ptr<LayerOverRanks> layer);
std::shared_ptr<LayerOverRanks> layer_over_ranks_of(const at::Tensor& tensor);  // null for other tensors

// The module's layers over ranks, each once, but for those whose Group is this rank alone.
std::vector<std::shared_ptr<LayerOverRanks>> layers_over_ranks(const torch::nn::Module& module);
bool trains_over_ranks(const torch::nn::Module& module);  // whether one of them trains

// For a strategy's modules, whose replicas may have no examples. Throws InvalidArgument that names a layer.
void require_no_layers_over_ranks(const torch::nn::Module& module);

}  // namespace lockstep::gradient
