// Parameter servers, which own the values: a step begins with theirs, gradients go to them, and they update.
#pragma once

#include <memory>
#include <vector>

#include "gradient/direct.h"
#include "gradient/gradient_path.h"
#include "parameter_server/client.h"
#include "parameter_server/servers/embedding_module.h"

namespace lockstep::servers {

// Trainable parameters, as variables of servers, in the order of their slots.
std::vector<parameter_server::VariableSpec> variables_of(const ReplicatedParameters& parameters);

// The servers' values and this process's copies of them.
class ServerValues final : public gradient::RemoteValues {
 public:
  // `client`'s variables are variables_of(parameters), its tables tables_of(parameters). `step_seconds`: of a call
  // that reads rows. The parameters live longer.
  ServerValues(ReplicatedParameters& parameters, std::shared_ptr<parameter_server::Client> client, double step_seconds);

  const std::shared_ptr<parameter_server::Client>& client() const { return client_; }

  void fetch(Deadline deadline) override;
  void fetch_changed(Deadline deadline) override;
  void store(Deadline deadline) override;

  // Throws as EmbeddingModule::bind.
  std::unique_ptr<gradient::Reduction> make_reduction() override;

  // Returns memory that servers on this host access where it lies, and puts copy 0 of the values there. It has
  // flat_bytes() for the values, for the gradients of each replica, and for their sums where replicas are several.
  Memory share();

 private:
  std::vector<std::byte*> variables() const;
  std::int64_t changes_here() const;

  ReplicatedParameters& parameters_;
  const std::shared_ptr<parameter_server::Client> client_;
  const double step_seconds_;
  const std::vector<gradient::Shard> variables_;
  parameter_server::Client::Versions fetched_;  // of the values; empty: none
  std::int64_t changes_when_fetched_ = 0;
};

// The replicas of this process add up their gradients, each a share of the elements, and replica 0 pushes them. Rows of
// tables are read by the modules of ShardedEmbedding; their gradients are pushed with the others.
class ServerReduction final : public gradient::Reduction {
 public:
  // Throws as EmbeddingModule::bind. `values` lives longer.
  ServerReduction(const ReplicatedParameters& parameters, ServerValues& values, double step_seconds);
  ~ServerReduction() override;

  void prepare() override { memory_ = values_.share(); }
  at::Tensor memory_for(int replica, std::size_t slot) const override;
  void add(int replica, std::size_t slot, const at::Tensor& gradient) override;
  gradient::Sums finish(const Group& replicas, double weight, bool check_finite, Deadline deadline) override;
  void end_step(int replica, StepEnd end) override;

 private:
  void add_up(int replica, const gradient::Sums& own);
  void push(const gradient::Sums& own, Deadline deadline);
  std::vector<parameter_server::Rows> rows_of_table(std::size_t table) const;
  at::Tensor gradient_memory(int index, const gradient::ParameterSlot& slot) const;

  const ReplicatedParameters& parameters_;
  ServerValues& values_;
  const std::shared_ptr<parameter_server::Client> client_;
  std::vector<std::vector<std::shared_ptr<EmbeddingModule>>> embeddings_;  // [replica][table]
  const gradient::ShardMap shares_;  // of all variables, `owned()`, what each replica adds up
  gradient::Direct own_;             // has the gradients of this process's replicas
  Memory memory_;                    // as ServerValues::share; null before `prepare`
};

// The client of the servers that update the path's parameters.
parameter_server::Client& client_of(const GradientPath& path);

}  // namespace lockstep::servers
