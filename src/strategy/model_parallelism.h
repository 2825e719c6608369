// The way in which a strategy splits every model over several workers. The module `parallel` has several ways.
#pragma once

#include <memory>
#include <string>

#include "collective/topology.h"
#include "gradient/parameter_parts.h"

namespace torch::nn {
class Module;
}

namespace lockstep::strategy {

// For a strategy whose processes have one replica each.
class ModelParallelism {
 public:
  virtual ~ModelParallelism() = default;

  virtual const Topology& topology() const = 0;

  // Returns the lines that must be the same for a worker that comes to an elastic job.
  virtual std::string describe() const = 0;

  // Replaces the topology's Groups after workers of an elastic strategy were lost. Collective over the members of the
  // next generation; throws what elastic::Membership::group throws.
  virtual void regroup(double timeout_seconds) const = 0;

  // Keeps this worker's part of a module, which all have made. Collective over the workers.
  virtual gradient::ModelPart split(torch::nn::Module& module) const = 0;
};

}  // namespace lockstep::strategy
