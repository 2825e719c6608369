// The variables of a model on its servers, as another process reads and updates them.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "lockstep/base/deadline.h"
#include "parameter_server/push.h"
#include "parameter_server/shard_places.h"

namespace lockstep::parameter_server {

// The way to one server. Any thread.
class ServerConnection {
 public:
  virtual ~ServerConnection() = default;

  // Returns when the server has the push. May be repeated. Throws InvalidArgument for one that does not fit.
  virtual void push(Push push, Deadline deadline) = 0;

  // Copies the values of the server's shards, in their order, each as a number of whole updates left it.
  virtual void pull(std::span<std::byte* const> shards, Deadline deadline) = 0;
};

// One thread at a time. Throws what the connections throw.
class Client {
 public:
  // `connections[s]`: to server s.
  Client(std::vector<VariableSpec> variables, std::vector<ShardPlace> places,
         std::vector<std::shared_ptr<ServerConnection>> connections);

  // Values of whole variables, by their numbers.
  void pull(std::span<std::byte* const> values, Deadline deadline) const;

  // The task whose gradients are pushed next.
  void begin(Task task) { task_ = task; }

  // Gradients of whole variables, by their numbers; null where a variable took no part. `push` has what else is sent;
  // its gradients and task are set here.
  void push(Push push, std::span<const std::byte* const> gradients, Deadline deadline) const;

 private:
  // Calls act(connection, begins) for all servers at once: where each of the server's shards begins in `variables`.
  template <class Byte, class Act>
  void on_servers(std::span<Byte* const> variables, const Act& act) const;

  const std::vector<VariableSpec> variables_;
  const std::vector<ShardPlace> places_;
  const std::vector<std::shared_ptr<ServerConnection>> connections_;
  Task task_;
};

}  // namespace lockstep::parameter_server
