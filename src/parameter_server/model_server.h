// A server's part of the job's models.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "lockstep/cluster/store.h"
#include "parameter_server/roles.h"
#include "parameter_server/served_models.h"
#include "parameter_server/service.h"

namespace lockstep::parameter_server {

// second_of: the server with the second copies of a server's shards. first_of_second: whose second copies a server has.
inline int second_of(int server, int servers) { return (server + 1) % servers; }
inline int first_of_second(int server, int servers) { return (server + servers - 1) % servers; }

// One thread.
class ModelServer {
 public:
  // `copies`: of each shard, 1 or 2. `reconnect_seconds`: how long the store is asked.
  ModelServer(const Roles& roles, int copies, Store store, double reconnect_seconds);

  const std::shared_ptr<ServedModels>& models() const { return models_; }
  const std::shared_ptr<ServedModels>& second_copies() const { return second_copies_; }  // null with one copy

  struct Model {
    std::int64_t number = 0;
    std::string description;
    std::function<std::shared_ptr<ShardStore>(int server)> make;  // that server's shards

    // As ServiceEngine's, of a server's shards or of their second copies.
    std::function<bool(int server, bool second_copies, std::int64_t number, ShardStore& to, Deadline deadline)>
        transfer;
  };

  // Until the result ends, the server has its shards of the model, and the second copies of another server's. A server
  // that was started again gets them from the other copy. Where that was lost too, the first copy is the last
  // checkpoint's, and the second waits for it. Throws ClusterError without a checkpoint, DeadlineExceeded where the
  // first copy does not come back, and what a transfer or a restored checkpoint throws.
  std::shared_ptr<void> serve(const Model& model);

  // As ServedModels'.
  void close();

 private:
  void add_first(const Model& model, const std::string& status);
  void add_second(const Model& model, const std::string& status);
  std::shared_ptr<ShardStore> transferred(const Model& model, int server, bool from_second);
  std::int64_t restore(const Model& model, const std::shared_ptr<ShardStore>& shards) const;
  std::string status_of(const Model& model) const;
  Deadline deadline() const { return Deadline::after(std::chrono::duration<double>(reconnect_seconds_)); }

  const Roles roles_;
  Store store_;
  const double reconnect_seconds_;
  const std::shared_ptr<ServedModels> models_, second_copies_;
};

}  // namespace lockstep::parameter_server
