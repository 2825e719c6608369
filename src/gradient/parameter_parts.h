// The parameters that a process trains: those of a module, or those of its part of a module that is split over several
// processes (module `parallel`). Each process may have a part of a parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/collective/communicator.h"

namespace torch::nn {
class Module;
}

namespace lockstep {
class ReplicatedParameters;
}

namespace lockstep::gradient {

// How a parameter, and its state in the optimizer, lies on the processes.
class ParameterParts {
 public:
  virtual ~ParameterParts() = default;

  // The processes that have the other parts are the product of these Communicators.
  virtual std::vector<Communicator> holders() const = 0;

  // True where the parts make up one tensor; else each process has a parameter of its own, such as another expert.
  virtual bool make_up_a_whole() const { return true; }
  virtual std::vector<std::int64_t> whole_sizes(at::IntArrayRef part) const = 0;

  // The whole of which `part` is this process's. Collective over the holders; a new tensor.
  virtual at::Tensor whole(const at::Tensor& part) const = 0;

  // This process's part, with whole_sizes of the parameter. Not collective.
  virtual at::Tensor part_of(const at::Tensor& whole) const = 0;
};

// Returns the parts that a parameter's hook tells (ops/parameter_hook.h), as parallelize_module adds; null without one.
std::shared_ptr<const ParameterParts> parts_of(const at::Tensor& parameter);

// A parameter that a process trains: one of a module, or its part of one of a module that is split.
struct TrainedTensor {
  std::string name;  // the first one
  at::Tensor tensor;
  std::shared_ptr<const ParameterParts> parts = {};  // null: this process has the whole parameter
  bool is_copy = false;                   // of a parameter that another worker, or this one under another name, has too
  std::int64_t capacity = 0;              // elements that its place in the flat buffers has, if more than it needs
  std::vector<std::string> aliases = {};  // its other names, where find_parameters has found it
};

struct ModelPart {
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
std::vector<TrainedTensor> find_parameters(const std::vector<TrainedTensor>& trained);
std::vector<TrainedTensor> find_parameters(const torch::nn::Module& module);

// A line with the facts of a parameter that processes compare: name, dtype, shape, and whether it is frozen.
std::string description_line(const std::string& name, const at::Tensor& parameter);

// Slots whose other parts the same processes have, in groups. For a model that is split.
using SlotGroups = std::vector<std::vector<std::size_t>>;
SlotGroups slots_by_holders(const ReplicatedParameters& parameters);

// Adds to `squares[slot]`, the sum of squares of this process's part, those of the other parts. Returns the sum over
// all parameters of the model, the same bits on all. Collective over all workers.
double sum_squares_of_parts(const ReplicatedParameters& parameters, const SlotGroups& groups,
                            std::span<double> squares);

}  // namespace lockstep::gradient
