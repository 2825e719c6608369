// The parameters that a process trains: those of a module, or of its part of a module that is split over several
// processes (module `parallel`).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradient/parameter_parts.h"
#include "lockstep/collective/communicator.h"

namespace torch::nn {
class Module;
}

namespace lockstep::gradient {

struct TrainedTensor {
  std::string name;
  at::Tensor tensor;
  std::shared_ptr<const ParameterParts> parts = {};  // null: this process has the whole parameter
  bool is_copy = false;       // of a parameter that another worker, or this one under another name, has too
  std::int64_t capacity = 0;  // elements that its place in the flat buffers has, if more than it needs
};

struct SplitModule {
  std::vector<TrainedTensor> trained;  // in place of the module's own parameters; one under several names is tied

  // All parameters of the whole model, a line each: the same on all workers.
  std::string description = {};

  // The positions that a sequence must have, of which each worker has a part; 0: any number.
  std::int64_t positions = 0;

  // The workers over which backward, or after_backward, sums gradients; none: gradients are of this worker's examples.
  std::optional<Communicator> summed_over = {};

  // Called before a forward; before a backward, with the factor that gradients are multiplied by; and after a backward,
  // before its gradients are used. Null: nothing is called.
  std::function<void()> before_forward = {};
  std::function<void(double factor)> before_backward = {};
  std::function<void()> after_backward = {};

  // True where backward itself sums gradients: of parameters that are sharded over summed_over.
  bool sums_in_backward() const { return before_backward != nullptr; }

  // Called in an elastic job after the workers' Groups were replaced; a step may have broken off. Or null. Collective.
  std::function<void()> after_regroup = {};
};

// The parameters of a module, each once: by identity, in order of their first names.
struct FoundParameters {
  std::vector<at::Tensor> tensors;
  std::vector<std::vector<std::string>> names;
  std::vector<TrainedTensor> trained;  // under their first names
};

FoundParameters find_parameters(const std::vector<TrainedTensor>& trained);
FoundParameters find_parameters(const torch::nn::Module& module);

}  // namespace lockstep::gradient
