// Gradients go to parameter servers, which own all shards and update them; a step begins with their values.
#pragma once

#include <memory>
#include <vector>

#include "gradient/one_pass.h"
#include "parameter_server/client.h"

namespace lockstep::gradient {

// Trainable parameters, as variables of servers, in the order of their slots.
std::vector<parameter_server::VariableSpec> variables_of(const ReplicatedParameters& parameters);

// The replicas of this process add up their gradients, each a share of the elements, and replica 0 pushes them.
class ParameterServerSync final : public OnePass {
 public:
  // `client`'s variables are variables_of(parameters).
  ParameterServerSync(ReplicatedParameters& parameters, std::shared_ptr<parameter_server::Client> client);

  ShardMap shards() const override { return ShardMap::even({}, parameters_.replicas()); }
  void fetch(Deadline deadline) override;
  void store(Deadline deadline) override;
  void wait(const Group& replicas, Deadline deadline) override;

 private:
  void add_up(int replica);
  void push(Deadline deadline);

  std::vector<std::byte*> variables() const;

  const std::shared_ptr<parameter_server::Client> client_;
  const ShardMap shares_;      // of all variables, `owned()`, what each replica adds up
  at::Tensor float_, double_;  // flat: the sums of this step
};

}  // namespace lockstep::gradient
