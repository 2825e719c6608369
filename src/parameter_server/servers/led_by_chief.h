// The calls of a model whose variables are on parameter servers: the chief makes them for all.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/checkpoint/checkpoint.h"
#include "parameter_server/server_cluster.h"
#include "parameter_server/servers/follow_chief.h"
#include "train/lead.h"

namespace lockstep::servers {

class LedByChief final : public train::Lead {
 public:
  // `servers`: this process among the others; it must outlive this.
  LedByChief(ModelImpl& impl, parameter_server::ServerCluster& servers) : Lead(impl), servers_(servers) {}

  void once(const std::function<void()>& act) const override;
  std::string follow_fit(Model& model, const Dataset& data, const FitOptions& options, std::int64_t call) override {
    return follow_chief(model, data, options, call, evaluated_step_);
  }
  bool needs_each_step() const override { return true; }
  void prepare_fit(const Dataset& data) override;
  std::unique_ptr<train::StepSource> steps(const Dataset& data, const FitOptions& options) const override;

  // Each part of a step has its share of the weight. Servers do not count a part without weight, and may drop spare
  // parts.
  double weight_of_sum(const ReplicaContext& replica) const override;

  // On the chief, during a fit, brings also the buffers that workers have reported.
  void fetch() const override;

  void fetch_before_saving() const override { fetch(); }
  void load_checkpoint(const std::string& path) const override;
  void write_first_backup(const std::string& path) const override { write_file({.path = path}); }
  void require_background(const char* callback) const override;
  void tell_of_weights() const override;

 protected:
  // Servers write their variables into a checkpoint while workers go on with their steps.
  void write_file(const train::StateFile& file) const override;
  std::optional<std::string> begin(const std::string& name, const Follow& follow) override;
  void end(const std::function<std::string()>& outcome) override;
  void fail(const std::exception& error) override;

 private:
  const parameter_server::Client& client() const;
  Archive with_own_variables(Archive archive) const;
  void write_with_servers(const std::string& path) const;
  void load_with_servers(const std::string& path) const;
  void tell_workers() const;

  parameter_server::ServerCluster& servers_;
  std::int64_t call_ = 0;             // the number of the call that the chief makes
  std::int64_t evaluated_step_ = -1;  // an evaluator's: the step of the last checkpoint that it evaluated
};

// Makes the steps of the chief of a cluster with parameter servers, whose fit is call number `call`.
std::unique_ptr<train::StepSource> assigned_steps(ModelImpl& impl, parameter_server::ServerCluster& servers,
                                                  std::int64_t call, const Dataset& data, const FitOptions& options);

}  // namespace lockstep::servers
