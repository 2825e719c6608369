// The parameters of a module, each once.
#pragma once

#include <string>
#include <vector>

#include "gradient/split_module.h"

namespace torch::nn {
class Module;
}

namespace lockstep::gradient {

// By identity, in order of their first names.
struct FoundParameters {
  std::vector<at::Tensor> tensors;
  std::vector<std::vector<std::string>> names;
  std::vector<TrainedTensor> trained;  // under their first names
};

FoundParameters find_parameters(const std::vector<TrainedTensor>& trained);
FoundParameters find_parameters(const torch::nn::Module& module);

}  // namespace lockstep::gradient
