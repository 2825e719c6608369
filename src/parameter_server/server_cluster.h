// The processes of a job with parameter servers, as one of them sees the others.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/cluster/store.h"
#include "lockstep/optimizer/optimizer.h"
#include "parameter_server/client.h"
#include "parameter_server/coordinator.h"
#include "parameter_server/roles.h"
#include "parameter_server/served_models.h"

namespace lockstep::parameter_server {

struct ServerClusterOptions {
  Partitioner partitioner = {};
  UpdateMode mode = {};
  double start_timeout_seconds = 300;     // until all processes have come
  double reconnect_timeout_seconds = 60;  // how long a process that does not answer is called again
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

  // Of this host's workers, which this one is, and how many there are; of other processes 0 of 1.
  struct Place {
    int rank = 0, size = 1;
  };
  Place among_local_workers() const { return place_; }

  // How many replicas each worker has, of which a worker passes its own. Throws ClusterError where workers differ.
  int agree_on_replicas(int mine) const;

  // A model's variables on the servers, with this process's part of them where it is a server. All processes make their
  // models in the same order. The chief's returns when all servers have the model.
  std::shared_ptr<Client> make_model(const std::vector<VariableSpec>& variables, const Optimizer& optimizer);

  // The number of the next call (fit, evaluate) that all processes make.
  std::int64_t next_call() { return calls_++; }

  Coordinator& coordinator() { return *coordinator_; }  // of the chief
  ChiefConnection& chief() { return *chief_; }          // of all others

  // What the call returned on the chief: waits for it. Throws Error with the chief's text where it failed there.
  std::string outcome(std::int64_t call);

  // The deadline of a call that begins now.
  Deadline reconnect_deadline() const {
    return Deadline::after(std::chrono::duration<double>(options_.reconnect_timeout_seconds));
  }

 private:
  FindAddress address_of(Role role, int index) const;
  void wait_for_all(Deadline deadline);

  const Roles roles_;
  const ServerClusterOptions options_;
  const ServiceEngine& engine_;
  Store store_;
  Access access_;
  std::shared_ptr<ServedModels> models_;      // of a server
  std::shared_ptr<Coordinator> coordinator_;  // of the chief
  std::unique_ptr<Endpoint> endpoint_;        // of both
  std::shared_ptr<ChiefConnection> chief_;
  Place place_;
  std::int64_t models_made_ = 0, calls_ = 0;
};

// How the outcome of a call is told: what it returned, or why it failed.
std::string outcome_of(const std::string& result);
std::string outcome_of_failure(const std::string& why);

}  // namespace lockstep::parameter_server
