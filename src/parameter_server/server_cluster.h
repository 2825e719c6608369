// The processes of a job with parameter servers, as one of them sees the others.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cluster/cpu_partition.h"
#include "lockstep/cluster/store.h"
#include "lockstep/optimizer/optimizer.h"
#include "parameter_server/client.h"
#include "parameter_server/coordinator.h"
#include "parameter_server/model_server.h"
#include "parameter_server/roles.h"

namespace lockstep::parameter_server {

struct ServerClusterOptions {
  Partitioner partitioner = {};
  UpdateMode mode = {};
  int replicas_of_shards = 1;                           // 2: each shard is on two servers
  bool bfloat16_gradients = false;                      // float32 gradients are sent rounded, but in shared memory
  double start_seconds = kStartTimeoutSeconds;          // until all processes have come
  double reconnect_seconds = kReconnectTimeoutSeconds;  // how long a process that does not answer is called again
};

// One thread at a time, but for what is said to be for any.
class ServerCluster {
 public:
  // Waits until all processes have come. `cluster` is what with_roles returned. Throws ClusterError, and
  // DeadlineExceeded naming those that have not come.
  ServerCluster(const Cluster& cluster, ServerClusterOptions options, const ServiceEngine& engine = service_engine());
  ~ServerCluster();

  const Roles& roles() const { return roles_; }
  bool is_chief() const { return roles_.mine == Role::chief; }
  const UpdateMode& mode() const { return options_.mode; }

  // This process's place among this host's workers; of other processes 0 of 1.
  const cluster::CpuPartition& partition() const { return partition_; }

  // Returns how many replicas each worker has; a worker passes its own. Throws ClusterError where workers differ.
  int agree_on_replicas(int mine) const;

  // Makes a model on the servers, with this process's part of it where it is a server. All processes make their models
  // in one order. The chief's returns when all servers have the model.
  std::shared_ptr<Client> make_model(const ModelSpec& model, const Optimizer& optimizer);

  // The chief's, before the first fit of a model: true where the chief has to write the values, which a server that was
  // started again before lacks. From then on such a server restores its shards from the last checkpoint.
  bool claims_first_values(const Client& model);

  // Called when workers begin to train the model: true the first time, unless the model has a checkpoint.
  bool tell_training(const Client& model);

  // Called when a checkpoint of the model has been written.
  void tell_checkpoint(const Client& model, const std::string& path);
  std::optional<std::string> last_checkpoint(const Client& model) const;

  // The chief's: restores the model on all servers. Steps that were given out before are ignored from now on, whoever
  // still computes them. `number`: the model's in the program that wrote the checkpoint.
  void restore(const Client& model, const std::string& path, std::optional<std::int64_t> number, Deadline deadline);

  // True on a chief that was started again.
  bool restarted() const { return restarted_; }

  // True where a chief before this one has trained the model, and this one has not loaded a checkpoint of the model
  // yet. This one then does not know the model's steps.
  bool was_trained(const Client& model) const;

  // Throws ClusterError where it was.
  void require_known(const Client& model) const;

  // The number of the next call that all processes make, `name` (fit, evaluate). Waits until the chief makes it. Throws
  // as ChiefConnection::has_begun.
  std::int64_t next_call(const std::string& name);

  // The chief's: ends the call with an outcome, also for a chief that is started again.
  void end(std::int64_t call, const std::string& outcome);

  // Returns the call's result on a chief before this one. Throws as `outcome`.
  std::optional<std::string> outcome_before_restart(std::int64_t call);

  // Calls act() on the chief, unless a chief before this one did at this place in the program.
  void once(const std::function<void()>& act);

  Coordinator& coordinator() { return *coordinator_; }  // the chief's

  // Returns ask(the chief, deadline of the call). Where the chief does not answer, asks again for
  // reconnect_seconds, and no more once `gives_up`; then throws DeadlineExceeded. `is_short`: nothing large is
  // sent either way, so that a call can give up soon.
  template <class Ask>
  auto ask_chief(const Ask& ask, const std::function<bool()>& gives_up = {}, bool is_short = true) {
    const auto last = reconnect_deadline();
    while (true) {
      const auto soon = is_short ? Deadline::after(kToAnswer) : last;
      try {
        return ask(*chief_, soon.time() < last.time() ? soon : last);
      } catch (const DeadlineExceeded& error) {
        if (last.passed()) throw DeadlineExceeded("calling the chief", last.waited());
        if (gives_up && gives_up()) throw;
      }
    }
  }

  // Waits for the call's result on the chief and returns it. Throws Error with the chief's text where the call failed.
  std::string outcome(std::int64_t call, const std::function<bool()>& gives_up = {});

  // The deadline of a call that begins now.
  Deadline reconnect_deadline() const {
    return Deadline::after(std::chrono::duration<double>(options_.reconnect_seconds));
  }

 private:
  static constexpr std::chrono::seconds kToAnswer{3};  // longer than a chief that has no answer yet takes to say so

  FindAddress address_of(Role role, int index) const;
  std::string find_in_store(const std::string& key) const;
  ServiceEngine::ModelOnServer on_server(std::int64_t number, const ModelSpec& model,
                                         const std::vector<ShardPlace>& places, int server, bool second_copies) const;
  void tell(const Client& model, const SavedModel& saved);
  int holder_of(int server, bool second_copies) const;
  std::shared_ptr<void> keep_for_restarts(std::int64_t number) const;
  void wait_for_all(Deadline deadline);
  void wait_for_servers(Deadline deadline) const;

  const Roles roles_;
  const ServerClusterOptions options_;
  const ServiceEngine& engine_;
  Store store_;
  Access access_;
  std::optional<ModelServer> server_;         // of a server
  std::shared_ptr<Coordinator> coordinator_;  // of the chief
  std::unique_ptr<Endpoint> endpoint_;        // of both
  std::shared_ptr<ChiefConnection> chief_;
  cluster::CpuPartition partition_;
  std::int64_t models_made_ = 0, calls_ = 0, acts_ = 0;
  bool chief_failed_ = false;  // the last call failed on the chief too
  bool restarted_ = false;
  const int exceptions_ = std::uncaught_exceptions();
};

// The outcome of a call as text: its result, or why it failed.
std::string outcome_of(const std::string& result);
std::string outcome_of_failure(const std::string& why);

}  // namespace lockstep::parameter_server
