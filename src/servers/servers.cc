#include "servers/servers.h"

#include "lockstep/base/error.h"
#include "servers/embedding_module.h"
#include "servers/led_by_chief.h"
#include "servers/loop_checkpoint.h"
#include "servers/server_reduction.h"

namespace lockstep::servers {

Topology Servers::topology() const {
  Topology topology;
  topology.replicas_in_step = replicas_in_step_;
  topology.may_be_chief = cluster_->is_chief();
  return topology;
}

std::shared_ptr<GradientPath> Servers::make_gradient_path(const StrategyImpl& strategy, const Optimizer& optimizer,
                                                          std::shared_ptr<ReplicatedParameters> parameters,
                                                          gradient::GradientPathOptions options) const {
  const auto& ranks = optimizer.options().gradient_ranks;
  if (ranks && ranks->ranks.size() > 1) {
    throw InvalidArgument(
        "the optimizer's gradients are summed with those of other processes, and parameter servers sum those of all "
        "workers; take one or the other");
  }
  parameters->update_trainable();
  const std::shared_ptr<parameter_server::Client> client =
      cluster_->make_model({.variables = variables_of(*parameters), .tables = tables_of(*parameters)}, optimizer);
  options.remote = std::make_shared<ServerValues>(*parameters, client, strategy.settings().timeouts.step);
  auto path = std::make_shared<GradientPath>(std::move(parameters), optimizer, options);
  if (cluster_->is_chief() && !cluster_->was_trained(*client)) path->remote()->store(strategy.deadline());
  return path;
}

ReplicatedOptimizer Servers::optimizer_of_loop(const std::shared_ptr<StrategyImpl>& strategy,
                                               const std::shared_ptr<GradientPath>& gradients) {
  paths_of_loops_.push_back(gradients);
  return ReplicatedOptimizer(gradients, files_of_loop(strategy, gradients));
}

std::shared_ptr<train::Lead> Servers::lead(ModelImpl& model) const {
  return std::make_shared<LedByChief>(model, *cluster_);
}

std::vector<std::shared_ptr<GradientPath>> Servers::paths_of_loops() {
  std::vector<std::shared_ptr<GradientPath>> paths;
  std::erase_if(paths_of_loops_, [](const auto& path) { return path.expired(); });
  for (const auto& path : paths_of_loops_) paths.push_back(path.lock());
  return paths;
}

Servers& servers_of(const StrategyImpl& strategy) { return dynamic_cast<Servers&>(*strategy.settings().kind); }

}  // namespace lockstep::servers
