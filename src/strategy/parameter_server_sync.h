// Gradients go to parameter servers, which own all shards and update them; a step begins with their values.
#pragma once

#include <memory>
#include <vector>

#include "gradient/gradient_path.h"
#include "gradient/one_pass.h"
#include "parameter_server/client.h"
#include "strategy/embedding_module.h"

namespace lockstep::strategy {

// Returns the trainable parameters, as variables of servers, in the order of their slots.
std::vector<parameter_server::VariableSpec> variables_of(const ReplicatedParameters& parameters);

// The replicas of this process add up their gradients, each for a share of the elements, and replica 0 pushes them.
// Modules of ShardedEmbedding read rows of tables; the rows' gradients are pushed with the others.
class ParameterServerSync final : public gradient::OnePass {
 public:
  // `client`'s variables are variables_of(parameters), its tables tables_of(parameters). `timeout_seconds`: for a call
  // that reads rows. Throws as EmbeddingModule::bind.
  ParameterServerSync(ReplicatedParameters& parameters, std::shared_ptr<parameter_server::Client> client,
                      double timeout_seconds);
  ~ParameterServerSync() override;

  parameter_server::Client& client() const { return *client_; }

  // Puts copy 0 of the values, and the gradients, into memory that servers on this host access directly.
  void prepare() override;

  gradient::ShardMap shards() const override { return gradient::ShardMap::even({}, parameters_.replicas()); }
  bool during_backward() const override { return true; }
  at::Tensor memory_for(int replica, std::size_t slot) const override;
  void on_ready(int replica, std::size_t slot, const at::Tensor& gradient) override;
  void fetch(Deadline deadline) override;
  void fetch_changed(Deadline deadline) override;
  void store(Deadline deadline) override;
  void wait(const Group& replicas, Deadline deadline) override;
  void forget(int replica) override;

 private:
  void add_up(int replica);
  void push(Deadline deadline);
  std::vector<parameter_server::Rows> rows_of_table(std::size_t table) const;

  std::vector<std::byte*> variables() const;
  std::int64_t changes_here() const;
  at::Tensor gradient_memory(std::size_t index, const gradient::ParameterSlot& slot) const;

  const std::shared_ptr<parameter_server::Client> client_;
  ReplicatedParameters& writable_;
  std::vector<std::vector<std::shared_ptr<EmbeddingModule>>> embeddings_;  // [replica][table]
  const gradient::ShardMap shares_;  // of all variables; `owned()`: what each replica adds up

  parameter_server::Client::Versions fetched_;  // the values' versions; empty: none
  std::int64_t changes_when_fetched_ = 0;

  // Values; each replica's gradients; and with several replicas the sums: flat_bytes() each. Null before `prepare`.
  Memory memory_;
};

// Returns the client of the servers that update the path's parameters; null where this process updates them.
parameter_server::Client* servers_of(const GradientPath& path);

}  // namespace lockstep::strategy
