// Parameters of which each of several processes has a part, in a model that is split over them (module `parallel`).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/collective/communicator.h"

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

}  // namespace lockstep::gradient

namespace lockstep {
class ReplicatedParameters;
}

namespace lockstep::gradient {

// Sums over a whole model of what each process knows of its parts.
class PartSums {
 public:
  explicit PartSums(const ReplicatedParameters& parameters);

  // Adds to `squares[slot]`, the sum of squares of this process's part, those of the other parts. Returns the sum over
  // all parameters of the model, the same bits on all. Collective over all workers.
  double sum_squares(std::span<double> squares) const;

  // True where `holds` is true on all workers. Collective over them.
  bool all(bool holds) const;

 private:
  struct Divided {
    std::vector<Communicator> holders;
    std::vector<std::size_t> slots;
  };

  const ReplicatedParameters& parameters_;
  std::vector<Divided> divided_;
};

}  // namespace lockstep::gradient
