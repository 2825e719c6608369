#include "parameter_server/client.h"

#include <future>
#include <utility>

#include "lockstep/base/error.h"
#include "parameter_server/shared_block.h"

namespace lockstep::parameter_server {

Client::Client(std::vector<VariableSpec> variables, std::vector<ShardPlace> places,
               std::vector<std::shared_ptr<ServerConnection>> connections, std::int64_t model)
    : variables_(std::move(variables)),
      places_(std::move(places)),
      connections_(std::move(connections)),
      model_(model) {}

template <class Byte, class Act>
void Client::on_servers(std::span<Byte* const> variables, const Act& act) const {
  std::vector<std::vector<Byte*>> shards(connections_.size());
  for (const auto& place : places_) {
    auto* const variable = variables[place.variable];
    const auto offset = static_cast<std::size_t>(place.begin) * size_of(variables_[place.variable].dtype);
    shards[static_cast<std::size_t>(place.server)].push_back(variable == nullptr ? nullptr : variable + offset);
  }
  std::vector<std::future<void>> others;
  for (std::size_t server = 1; server < connections_.size(); ++server) {
    others.push_back(std::async(std::launch::async, [&, server] { act(*connections_[server], shards[server]); }));
  }
  act(*connections_[0], shards[0]);
  for (auto& other : others) other.get();
}

void Client::pull(std::span<std::byte* const> values, Deadline deadline) const {
  on_servers(values,
             [&](ServerConnection& server, const std::vector<std::byte*>& shards) { server.pull(shards, deadline); });
}

void Client::open(const std::string& description, Deadline deadline) const {
  for (const auto& connection : connections_) connection->open(description, deadline);
}

Memory Client::share(std::size_t bytes, Deadline deadline) const {
  const auto block = SharedBlock::make(bytes);
  for (const auto& connection : connections_) connection->share(block, deadline);
  return {block->begin(), [block](std::byte*) {}};
}

void Client::write(std::span<const std::byte* const> values, Deadline deadline) const {
  on_servers(values, [&](ServerConnection& server, const std::vector<const std::byte*>& shards) {
    server.write(shards, deadline);
  });
}

void Client::begin(Task task, std::optional<double> learning_rate) {
  task_ = task;
  learning_rate_ = learning_rate;
}

void Client::push(Push push, std::span<const std::byte* const> gradients, Deadline deadline) {
  if (!task_) throw InvalidArgument(kOutsideOfStep);
  push.task = *std::exchange(task_, std::nullopt);
  push.learning_rate = learning_rate_;
  on_servers(gradients, [&](ServerConnection& server, const std::vector<const std::byte*>& shards) {
    auto to_server = push;
    to_server.gradients = shards;
    server.push(std::move(to_server), deadline);
  });
}

}  // namespace lockstep::parameter_server
