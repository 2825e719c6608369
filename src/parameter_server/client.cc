#include "parameter_server/client.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <span>
#include <utility>

#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/sharded_archive.h"
#include "lockstep/base/error.h"
#include "parameter_server/shared_block.h"
#include "parameter_server/table_files.h"

namespace lockstep::parameter_server {
namespace {

// Which server has which of the rows.
class RowsByServer {
 public:
  RowsByServer(std::span<const std::int64_t> ids, std::size_t servers) : all_(ids), places_(servers), ids_(servers) {
    if (servers == 1) return;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto server = static_cast<std::size_t>(server_of_row(ids[i], static_cast<int>(servers)));
      places_[server].push_back(i);
      ids_[server].push_back(ids[i]);
    }
  }

  std::span<const std::int64_t> ids(std::size_t server) const { return ids_.size() == 1 ? all_ : ids_[server]; }

  // The server's of all rows, and the reverse; a row has `bytes`.
  std::vector<std::byte> gather(std::size_t server, const std::byte* all, std::size_t bytes) const {
    std::vector<std::byte> rows(places_[server].size() * bytes);
    auto* to = rows.data();
    for (const auto place : places_[server]) to = std::copy_n(all + place * bytes, bytes, to);
    return rows;
  }
  void scatter(std::size_t server, const std::byte* rows, std::byte* all, std::size_t bytes) const {
    for (const auto place : places_[server]) {
      std::copy_n(rows, bytes, all + place * bytes);
      rows += bytes;
    }
  }

 private:
  const std::span<const std::int64_t> all_;
  std::vector<std::vector<std::size_t>> places_;  // [server], in `all_`
  std::vector<std::vector<std::int64_t>> ids_;    // [server]
};

}  // namespace

Client::Client(ModelSpec model, std::vector<ShardPlace> places,
               std::vector<std::shared_ptr<ServerConnection>> connections, std::int64_t number,
               std::vector<std::string> states)
    : model_(std::move(model)),
      places_(std::move(places)),
      connections_(std::move(connections)),
      number_(number),
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

template <class Byte>
std::vector<std::vector<Byte*>> Client::by_servers(std::span<Byte* const> variables) const {
  std::vector<std::vector<Byte*>> shards(connections_.size());
  for (const auto& place : places_) {
    auto* const variable = variables[place.variable];
    const auto offset = static_cast<std::size_t>(place.begin) * size_of(model_.variables[place.variable].dtype);
    shards[static_cast<std::size_t>(place.server)].push_back(variable == nullptr ? nullptr : variable + offset);
  }
  return shards;
}

void Client::pull_rows(std::size_t table, std::span<const std::int64_t> ids, std::byte* values,
                       Deadline deadline) const {
  check_ids(tables().at(table), ids);
  const auto row = tables()[table].row_bytes();
  if (connections_.size() == 1) return connections_[0]->pull_rows(table, ids, {values, ids.size() * row}, deadline);
  const RowsByServer split(ids, connections_.size());
  on_all([&](ServerConnection& connection, std::size_t server) {
    std::vector<std::byte> rows(split.ids(server).size() * row);
    connection.pull_rows(table, split.ids(server), rows, deadline);
    split.scatter(server, rows.data(), values, row);
  });
}

void Client::pull(std::span<std::byte* const> values, Deadline deadline) const {
  const auto shards = by_servers(values);
  on_all([&](ServerConnection& connection, std::size_t server) { connection.pull(shards[server], deadline); });
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
  const auto shards = by_servers(values);
  on_all([&](ServerConnection& connection, std::size_t server) { connection.write(shards[server], deadline); });
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
    return folder / checkpoint::name_of_part("ps", static_cast<int>(server), static_cast<int>(connections_.size()));
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
      const auto own = rows_of(model_.variables, place).names(states_);
      names.insert(names.end(), own.begin(), own.end());
    }
    checkpoint::list_rows(main, folder.filename() / file_of(server).filename(), names);
  }
  if (!tables().empty()) list_tables(main, folder.filename(), static_cast<int>(connections_.size()));
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
  std::vector<RowsByServer> split;  // [table]
  for (const auto& rows : push.rows) split.emplace_back(rows.ids, connections_.size());
  const auto shards = by_servers(gradients);
  on_all([&](ServerConnection& connection, std::size_t server) {
    auto to_server = push;
    to_server.gradients = shards[server];
    std::vector<std::vector<std::byte>> own;
    for (std::size_t table = 0; connections_.size() > 1 && table < split.size(); ++table) {
      own.push_back(split[table].gather(server, push.rows[table].values, tables()[table].row_bytes()));
      to_server.rows[table] = {split[table].ids(server), own.back().data()};
    }
    connection.push(std::move(to_server), deadline);
  });
}

}  // namespace lockstep::parameter_server
