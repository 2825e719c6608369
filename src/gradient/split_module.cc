#include "gradient/split_module.h"

#include <torch/nn/module.h>

#include <map>

namespace lockstep::gradient {

FoundParameters find_parameters(const std::vector<TrainedTensor>& trained) {
  FoundParameters found;
  std::map<at::TensorImpl*, std::size_t> seen;
  for (const auto& one : trained) {
    const auto [at, fresh] = seen.emplace(one.tensor.unsafeGetTensorImpl(), found.tensors.size());
    if (fresh) {
      found.tensors.push_back(one.tensor);
      found.names.emplace_back();
      found.trained.push_back(one);
    }
    found.names[at->second].push_back(one.name);
  }
  return found;
}

FoundParameters find_parameters(const torch::nn::Module& module) {
  std::vector<TrainedTensor> trained;
  for (const auto& item : module.named_parameters(/*recurse=*/true)) {
    if (item.value().defined()) trained.push_back({item.key(), item.value()});
  }
  return find_parameters(trained);
}

}  // namespace lockstep::gradient
