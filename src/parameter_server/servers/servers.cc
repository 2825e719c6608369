#include "parameter_server/servers/servers.h"

#include "checkpoint/files.h"
#include "checkpoint/sharded_archive.h"
#include "lockstep/base/error.h"
#include "parameter_server/server_checkpoint.h"
#include "parameter_server/server_cluster.h"
#include "parameter_server/servers/embedding_module.h"
#include "parameter_server/servers/led_by_chief.h"
#include "parameter_server/servers/server_reduction.h"

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

namespace {

parameter_server::ServerCluster& servers_of_chief(const StrategyImpl& strategy) {
  if (strategy.topology().is_chief()) return servers_of(strategy).cluster();
  throw InvalidArgument(
      "with parameter servers the chief alone saves and restores a Checkpoint: call it in ClusterCoordinator::run, or "
      "where the strategy's is_chief() is true");
}

// Brings the servers' values here, so that the module's trackable has them too.
void pull(const StrategyImpl& strategy, GradientPath& gradients, const parameter_server::SavedSteps& steps) {
  gradients.remote()->fetch(strategy.deadline());
  gradients.updater().set_iterations(steps.updates);
}

void save(const StrategyImpl& strategy, GradientPath& gradients, const std::string& path) {
  auto& servers = servers_of_chief(strategy);
  const auto& model = client_of(gradients);
  servers.require_known(model);
  const auto steps = parameter_server::write_loop_checkpoint(
      *servers.coordinator().steps(), model, path, [&] { gradients.remote()->store(strategy.deadline()); },
      strategy.deadline());
  servers.tell_checkpoint(model, checkpoint::absolute_path(checkpoint_file(path)).string());
  servers.coordinator().tell_saved(model.model(), steps.end);
  pull(strategy, gradients, steps);
}

void load(const StrategyImpl& strategy, GradientPath& gradients, const std::string& path, bool change) {
  auto& servers = servers_of_chief(strategy);
  auto& coordinator = servers.coordinator();
  const auto& model = client_of(gradients);
  const auto file = checkpoint::absolute_path(checkpoint_file(path)).string();
  const auto main = read_archive(file);
  const auto steps = parameter_server::saved_steps_of(main);
  coordinator.steps()->end_of_finished();  // throws where steps have not finished
  if (!change) return model.check_restore(file, strategy.deadline());
  servers.restore(model, file, parameter_server::model_of(main), strategy.deadline());
  coordinator.steps()->skip_to(steps.end);
  coordinator.set_trained_by_program(model.model());
  coordinator.tell_saved(model.model(), steps.end);
  pull(strategy, gradients, steps);
}

}  // namespace

Trackable::Files files_of_loop(std::shared_ptr<StrategyImpl> strategy, std::shared_ptr<GradientPath> gradients) {
  return {[=](const std::string& path) { save(*strategy, *gradients, path); },
          [=](const std::string& path, bool change) { load(*strategy, *gradients, path, change); }};
}

}  // namespace lockstep::servers
