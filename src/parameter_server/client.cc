#include "parameter_server/client.h"

#include <atomic>
#include <future>
#include <utility>

#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/sharded_archive.h"
#include "lockstep/base/error.h"
#include "parameter_server/shared_block.h"

namespace lockstep::parameter_server {

Client::Client(std::vector<VariableSpec> variables, std::vector<ShardPlace> places,
               std::vector<std::shared_ptr<ServerConnection>> connections, std::int64_t model,
               std::vector<std::string> states)
    : variables_(std::move(variables)),
      places_(std::move(places)),
      connections_(std::move(connections)),
      model_(model),
      states_(std::move(states)) {}

template <class Act>
void Client::on_all(const Act& act) const {
  std::vector<std::future<void>> others;
  for (std::size_t server = 1; server < connections_.size(); ++server) {
    others.push_back(std::async(std::launch::async, [&, server] { act(*connections_[server], server); }));
  }
  act(*connections_[0], std::size_t{0});
  for (auto& other : others) other.get();
}

template <class Byte, class Act>
void Client::on_servers(std::span<Byte* const> variables, const Act& act) const {
  std::vector<std::vector<Byte*>> shards(connections_.size());
  for (const auto& place : places_) {
    auto* const variable = variables[place.variable];
    const auto offset = static_cast<std::size_t>(place.begin) * size_of(variables_[place.variable].dtype);
    shards[static_cast<std::size_t>(place.server)].push_back(variable == nullptr ? nullptr : variable + offset);
  }
  on_all([&](ServerConnection& connection, std::size_t server) { act(connection, shards[server]); });
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

bool Client::cut(std::int64_t end, Deadline deadline) const {
  std::atomic<bool> all = true;
  on_all([&](ServerConnection& server, std::size_t) {
    if (!server.cut(end, deadline)) all = false;
  });
  return all;
}

bool Client::save(std::int64_t end, const std::filesystem::path& folder, Archive& main, Deadline deadline) const {
  const auto file_of = [&](std::size_t server) {
    return folder / text("ps-", server, "-of-", connections_.size(), ".safetensors");
  };
  std::atomic<bool> saved = true;
  on_all([&](ServerConnection& connection, std::size_t server) {
    if (!connection.save(end, file_of(server), deadline)) saved = false;
  });
  if (!saved) return false;
  for (std::size_t server = 0; server < connections_.size(); ++server) {
    if (!checkpoint::file_exists(file_of(server))) {
      throw IoError(text("ps ", server, " wrote ", file_of(server).string(), ", which the chief does not see: with ",
                         "parameter servers, checkpoints need a folder that all hosts share"));
    }
    std::vector<std::string> names;
    for (const auto& place : places_) {
      if (static_cast<std::size_t>(place.server) != server) continue;
      const auto own = rows_of(variables_, place).names(states_);
      names.insert(names.end(), own.begin(), own.end());
    }
    checkpoint::list_rows(main, folder.filename() / file_of(server).filename(), names);
  }
  return true;
}

void Client::restore(const std::string& checkpoint, std::int64_t chief, Deadline deadline) const {
  for (const bool change : {false, true}) {
    on_all([&](ServerConnection& server, std::size_t) { server.restore(checkpoint, change, chief, deadline); });
  }
}

void Client::begin(const Assignment& assignment) {
  next_ = Push{.task = assignment.task,
               .learning_rate = assignment.learning_rate,
               .chief = assignment.chief,
               .finished = assignment.finished};
}

void Client::push(Push push, std::span<const std::byte* const> gradients, Deadline deadline) {
  if (!next_) throw InvalidArgument(kOutsideOfStep);
  const auto next = *std::exchange(next_, std::nullopt);
  push.task = next.task;
  push.learning_rate = next.learning_rate;
  push.chief = next.chief;
  push.finished = next.finished;
  on_servers(gradients, [&](ServerConnection& server, const std::vector<const std::byte*>& shards) {
    auto to_server = push;
    to_server.gradients = shards;
    server.push(std::move(to_server), deadline);
  });
}

}  // namespace lockstep::parameter_server
