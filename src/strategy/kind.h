// The decisions in which kinds of strategies differ.
#pragma once

#include <torch/nn/module.h>

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "base/timeouts.h"
#include "collective/topology.h"
#include "gradient/gradient_path.h"
#include "lockstep/strategy/compiled.h"
#include "lockstep/strategy/replicated.h"

namespace lockstep {
class ModelImpl;
class StrategyImpl;
namespace train {
class Execution;
class Lead;
}  // namespace train
}  // namespace lockstep

namespace lockstep::strategy {

struct WorkerSettings;

// This class is for strategies whose processes each have whole models, and compute steps by their own threads. Others
// are parallel::MeshParallelism, programs::Programs and servers::Servers. Outside of these modules nobody asks which
// kind it is: a decision that differs is a function here.
class Kind {
 public:
  virtual ~Kind() = default;

  // --- the strategy's processes

  // Throws InvalidArgument where no replica can have this device.
  virtual void check_device(const std::string& device) const;

  // Returns what this process knows of the topology before it has found the others.
  virtual Topology topology() const { return {}; }

  // The workers find each other, and find each other again after some were lost or have come. Collective. They throw
  // what Membership::group throws.
  virtual void connect(Topology& topology, const WorkerSettings& workers, const Timeouts& timeouts) const;
  virtual void reconnect(const Topology& topology, const WorkerSettings& workers, const Timeouts& timeouts) const;

  // Called once, when the workers have found each other and agreed on their strategies. The strategy outlives this.
  virtual void begin(StrategyImpl& /*strategy*/) {}

  // Returns lines that must be the same for all workers; each begins with a newline.
  virtual std::string describe() const { return {}; }

  // Tells the workers that wait for this one by other means than a Group that it fails.
  virtual void tell_failure(const std::exception& /*error*/) const {}

  // --- models and optimizers

  // Makes replicated parameters of modules, one a replica. Collective over the workers.
  virtual std::shared_ptr<ReplicatedParameters> replicate(
      StrategyImpl& strategy, const std::vector<std::shared_ptr<torch::nn::Module>>& modules) const;

  // True where variables of GPUs must be in host memory too.
  virtual bool needs_host_values() const { return false; }

  // Makes the path of an optimizer's gradients. Throws as GradientPath, and InvalidArgument where the model has what
  // this kind of strategy cannot train.
  virtual std::shared_ptr<GradientPath> make_gradient_path(const StrategyImpl& strategy, const Optimizer& optimizer,
                                                           std::shared_ptr<ReplicatedParameters> parameters,
                                                           gradient::GradientPathOptions options) const;

  // Makes the optimizer of a program's own loop.
  virtual ReplicatedOptimizer optimizer_of_loop(const std::shared_ptr<StrategyImpl>& strategy,
                                                const std::shared_ptr<GradientPath>& gradients);

  // Makes the variable that compiled steps have in the place of `copies`, one a replica; null where steps are not
  // compiled.
  virtual std::unique_ptr<ops::DeviceVariables> variable(const std::vector<at::Tensor>& /*copies*/) const;

  // Steps of a program's own loop. run_compiled is for strategies that compile them.
  virtual bool compiles_steps() const { return false; }
  virtual std::vector<std::vector<at::Tensor>> run_compiled(StrategyImpl& strategy,
                                                            const internal::StepToRun& step) const;

  // --- fit (train/execution.h, train/lead.h): null for that module's default. `model` outlives the result.

  virtual std::shared_ptr<train::Execution> execution(ModelImpl& /*model*/) const { return nullptr; }
  virtual std::shared_ptr<train::Lead> lead(ModelImpl& /*model*/) const { return nullptr; }
};

// The base of modules whose values only parameter servers have: others can neither train nor save them.
class RowsOnServers : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;
};

bool has_rows_on_servers(const torch::nn::Module& module);

}  // namespace lockstep::strategy
