// How a strategy splits every model over several workers. The module `parallel` has the ways to do it.
#pragma once

#include <memory>
#include <string>

#include "gradient/split_module.h"
#include "lockstep/collective/communicator.h"
#include "lockstep/collective/job.h"

namespace torch::nn {
class Module;
}

namespace lockstep::strategy {

// Of a strategy whose processes have one replica each.
class ModelParallelism {
 public:
  virtual ~ModelParallelism() = default;

  // All that train a model together. Those of them that train on other examples, in the order of these; and of the
  // latter those whose gradients are summed behind backward, which have the same parts of it.
  virtual const Communicator& workers() const = 0;
  virtual const Communicator& data_workers() const = 0;
  virtual const Communicator& gradient_workers() const = 0;

  // Those that have the same parts, one of each copy of a model.
  virtual const Communicator& same_part_workers() const = 0;

  // How many workers have one copy of a model together, and which part of it this one has, or is to have.
  virtual int row_size() const = 0;
  virtual int part() const = 0;

  // What must be the same for a worker that comes to an elastic job, in lines.
  virtual std::string describe() const = 0;

  // After workers were lost, of an elastic strategy: replaces the Groups of all these. Collective over those of `job`,
  // the next generation; throws what collective::group_of_generation throws.
  virtual void regroup(const Job& job, double timeout_seconds) const = 0;

  // Whether all workers compute in every step, with examples or without.
  virtual bool computes_without_examples() const = 0;

  // Whether this worker's losses and outputs count: it is one, the same always, of those with the same examples.
  virtual bool counts() const = 0;

  // Keeps this worker's part of a module, which all have made. Collective over the workers.
  virtual gradient::SplitModule split(torch::nn::Module& module) const = 0;
};

}  // namespace lockstep::strategy
