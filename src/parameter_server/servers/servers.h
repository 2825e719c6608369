// The kind of strategy whose variables parameter servers have.
#pragma once

#include <memory>
#include <vector>

#include "lockstep/checkpoint/checkpoint.h"
#include "parameter_server/server_cluster.h"
#include "strategy/strategy_impl.h"

namespace lockstep::servers {

// One thread.
class Servers final : public strategy::Kind {
 public:
  // `replicas_in_step`: replicas that compute a step together, of one worker or of all.
  Servers(std::shared_ptr<parameter_server::ServerCluster> cluster, int replicas_in_step)
      : cluster_(std::move(cluster)), replicas_in_step_(replicas_in_step) {}

  Topology topology() const override;
  bool needs_host_values() const override { return true; }
  std::shared_ptr<GradientPath> make_gradient_path(const StrategyImpl& strategy, const Optimizer& optimizer,
                                                   std::shared_ptr<ReplicatedParameters> parameters,
                                                   gradient::GradientPathOptions options) const override;
  ReplicatedOptimizer optimizer_of_loop(const std::shared_ptr<StrategyImpl>& strategy,
                                        const std::shared_ptr<GradientPath>& gradients) override;
  std::shared_ptr<train::Lead> lead(ModelImpl& model) const override;

  // This process among the others.
  parameter_server::ServerCluster& cluster() const { return *cluster_; }

  // Returns the paths that optimizer_of_loop got and that are still used, in their order.
  std::vector<std::shared_ptr<GradientPath>> paths_of_loops();

 private:
  const std::shared_ptr<parameter_server::ServerCluster> cluster_;
  const int replicas_in_step_;
  std::vector<std::weak_ptr<GradientPath>> paths_of_loops_;
};

// Returns the kind of a ParameterServerStrategy.
Servers& servers_of(const StrategyImpl& strategy);

// Checkpoints of the state that parameter servers have of a custom loop's optimizer. Makes files with the variables,
// the optimizer's state and the rows of tables, in a checkpoint of its own. The servers write it, and restore their
// shards from it when they are started again. For the chief; throws InvalidArgument elsewhere, and while scheduled
// steps have not finished.
Trackable::Files files_of_loop(std::shared_ptr<StrategyImpl> strategy, std::shared_ptr<GradientPath> gradients);

}  // namespace lockstep::servers
