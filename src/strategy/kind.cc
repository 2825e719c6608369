#include "strategy/kind.h"

#include <torch/nn/module.h>

#include <algorithm>

#include "lockstep/base/error.h"
#include "strategy/devices.h"
#include "strategy/strategy_impl.h"

namespace lockstep::strategy {

void Kind::check_device(const std::string& device) const { strategy::check_device(device); }

void Kind::connect(Topology& topology, const WorkerSettings& workers, const Timeouts& timeouts) const {
  topology.train_with({workers.membership->group(workers.group), timeouts.step, "worker"});
}

void Kind::reconnect(const Topology& topology, const WorkerSettings& workers, const Timeouts& timeouts) const {
  auto options = workers.group;
  options.timeout_seconds = timeouts.regroup;
  topology.all.regroup(workers.membership->group(options));
}

std::shared_ptr<ReplicatedParameters> Kind::replicate(
    StrategyImpl& strategy, const std::vector<std::shared_ptr<torch::nn::Module>>& modules) const {
  const auto on_replicas = [&](const auto& function) { strategy.replicas().run(function); };
  return std::make_shared<ReplicatedParameters>(modules, strategy.placement(), on_replicas, strategy.topology());
}

std::shared_ptr<GradientPath> Kind::make_gradient_path(const StrategyImpl& /*strategy*/, const Optimizer& optimizer,
                                                       std::shared_ptr<ReplicatedParameters> parameters,
                                                       gradient::GradientPathOptions options) const {
  if (has_rows_on_servers(parameters->module(0))) {
    throw InvalidArgument(
        "a ShardedEmbedding needs ParameterServerStrategy, whose servers have its rows; with other strategies use "
        "Embedding");
  }
  return std::make_shared<GradientPath>(std::move(parameters), optimizer, options);
}

ReplicatedOptimizer Kind::optimizer_of_loop(const std::shared_ptr<StrategyImpl>& /*strategy*/,
                                            const std::shared_ptr<GradientPath>& gradients) {
  return ReplicatedOptimizer(gradients);
}

std::unique_ptr<ops::DeviceVariables> Kind::variable(const std::vector<at::Tensor>& /*copies*/) const {
  return nullptr;
}

std::vector<std::vector<at::Tensor>> Kind::run_compiled(StrategyImpl& /*strategy*/,
                                                        const internal::StepToRun& /*step*/) const {
  throw Error("this strategy compiles no steps");
}

bool has_rows_on_servers(const torch::nn::Module& module) {
  const auto modules = module.modules(/*include_self=*/false);
  return std::any_of(modules.begin(), modules.end(),
                     [](const auto& each) { return dynamic_cast<const RowsOnServers*>(each.get()) != nullptr; });
}

}  // namespace lockstep::strategy
