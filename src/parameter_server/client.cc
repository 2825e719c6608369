#include "parameter_server/client.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <future>
#include <span>
#include <utility>

#include "base/mutex.h"
#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/sharded_archive.h"
#include "lockstep/base/error.h"
#include "parameter_server/shared_block.h"
#include "parameter_server/table_files.h"

namespace lockstep::parameter_server {
// Blocks that are not in use.
struct Client::RowMemory {
  Mutex mutex;
  std::vector<std::shared_ptr<SharedBlock>> free LOCKSTEP_GUARDED_BY(mutex);

  std::shared_ptr<SharedBlock> take(std::size_t bytes) {
    MutexLock lock(mutex);
    const auto fits = [&](const auto& block) { return block->bytes() >= bytes; };
    const auto found = std::find_if(free.begin(), free.end(), fits);
    if (found == free.end()) return nullptr;
    auto block = *found;
    free.erase(found);
    return block;
  }
  void give_back(std::shared_ptr<SharedBlock> block) {
    MutexLock lock(mutex);
    const auto larger = [&](const auto& other) { return other->bytes() > block->bytes(); };
    free.insert(std::find_if(free.begin(), free.end(), larger), std::move(block));  // the smallest that fits is taken
  }
};

Client::Client(ModelSpec model, std::vector<ShardPlace> places,
               std::vector<std::shared_ptr<ServerConnection>> connections, std::int64_t number,
               std::vector<std::string> states)
    : model_(std::move(model)),
      places_(std::move(places)),
      connections_(std::move(connections)),
      number_(number),
      states_(std::move(states)),
      row_memory_(std::make_shared<RowMemory>()) {}

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
  const auto ends = ends_of_servers(ids, servers());
  on_all([&](ServerConnection& connection, std::size_t server) {
    const auto begin = server == 0 ? 0 : ends[server - 1];
    const auto count = ends[server] - begin;
    connection.pull_rows(table, ids.subspan(begin, count), {values + begin * row, count * row}, deadline);
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

Memory Client::share_rows(std::size_t bytes, Deadline deadline) const {
  auto block = row_memory_->take(bytes);
  if (block == nullptr) {
    block = SharedBlock::make(std::bit_ceil(std::max<std::size_t>(bytes, std::size_t{1} << 16)));
    for (const auto& connection : connections_) connection->share(block, deadline);
  }
  return {block->begin(), [memory = row_memory_, block](std::byte*) { memory->give_back(block); }};
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
  std::vector<std::vector<std::size_t>> ends;  // [table][server]
  for (const auto& rows : push.rows) ends.push_back(ends_of_servers(rows.ids, servers()));
  const auto shards = by_servers(gradients);
  on_all([&](ServerConnection& connection, std::size_t server) {
    auto to_server = push;
    to_server.gradients = shards[server];
    for (std::size_t table = 0; table < ends.size(); ++table) {
      const auto begin = server == 0 ? 0 : ends[table][server - 1];
      const auto& [ids, values] = push.rows[table];
      to_server.rows[table] = {ids.subspan(begin, ends[table][server] - begin),
                               values + begin * tables()[table].row_bytes()};
    }
    connection.push(std::move(to_server), deadline);
  });
}

}  // namespace lockstep::parameter_server
