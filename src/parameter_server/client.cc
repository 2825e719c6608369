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
#include "parameter_server/table_shard.h"

namespace lockstep::parameter_server {
// Blocks of which pieces are given out one after the other. A block is used from its beginning again when it has none.
struct Client::RowMemory {
  struct Arena {
    std::shared_ptr<SharedBlock> block;
    std::size_t used = 0, pieces = 0;
  };
  Mutex mutex;
  std::vector<std::shared_ptr<Arena>> arenas LOCKSTEP_GUARDED_BY(mutex);

  // Null where none has room. `begin`: of the piece.
  std::shared_ptr<Arena> take(std::size_t bytes, std::byte*& begin) {
    MutexLock lock(mutex);
    for (const auto& arena : arenas) {
      if (arena->pieces == 0) arena->used = 0;
      if (arena->block->bytes() - arena->used < bytes) continue;
      begin = arena->block->begin() + arena->used;
      arena->used += bytes;
      ++arena->pieces;
      return arena;
    }
    return nullptr;
  }
  void give_back(Arena& arena) {
    MutexLock lock(mutex);
    --arena.pieces;
  }

  // Each has twice the room of the one before, so that there are few.
  std::size_t bytes_of_next(std::size_t wanted) {
    MutexLock lock(mutex);
    const auto last = arenas.empty() ? 0 : arenas.back()->block->bytes();
    return std::max({std::size_t{1} << 20, std::bit_ceil(wanted), 2 * last});
  }
  void add(std::shared_ptr<SharedBlock> block) {
    MutexLock lock(mutex);
    arenas.push_back(std::make_shared<Arena>());
    arenas.back()->block = std::move(block);
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

bool Client::pull(std::span<std::byte* const> values, Versions& versions, Deadline deadline) const {
  const auto shards = by_servers(values);
  auto now = versions;
  now.resize(connections_.size());
  on_all([&](ServerConnection& connection, std::size_t server) {
    connection.pull(shards[server], now[server], deadline);
  });
  return std::exchange(versions, now) != now;
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
  const auto whole = std::max<std::size_t>(64, (bytes + 63) / 64 * 64);
  std::byte* begin = nullptr;
  auto arena = row_memory_->take(whole, begin);
  while (arena == nullptr) {
    const auto block = SharedBlock::make(row_memory_->bytes_of_next(whole));
    for (const auto& connection : connections_) connection->share(block, deadline);
    row_memory_->add(block);
    arena = row_memory_->take(whole, begin);
  }
  return {begin, [memory = row_memory_, arena](std::byte*) { memory->give_back(*arena); }};
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

std::optional<std::int64_t> Client::save(std::int64_t end, const std::filesystem::path& folder, Archive& main,
                                         Deadline deadline) const {
  const auto file_of = [&](std::size_t server) {
    return folder / checkpoint::name_of_part("ps", static_cast<int>(server), static_cast<int>(connections_.size()));
  };
  std::vector<std::optional<std::int64_t>> updates(connections_.size());
  on_all([&](ServerConnection& connection, std::size_t server) {
    updates[server] = connection.save(end, file_of(server), deadline);
  });
  if (std::find(updates.begin(), updates.end(), std::nullopt) != updates.end()) return std::nullopt;
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
  return *std::max_element(updates.begin(), updates.end());  // a server that was started again may lack some
}

void Client::check_restore(const std::string& checkpoint, Deadline deadline) const {
  on_all([&](ServerConnection& server, std::size_t) { server.restore(checkpoint, std::nullopt, deadline); });
}

void Client::restore(const std::string& checkpoint, std::int64_t chief, Deadline deadline) const {
  on_all([&](ServerConnection& server, std::size_t) { server.restore(checkpoint, chief, deadline); });
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
  std::atomic<int> updated = 0;
  const auto push_to = [&](ServerConnection& connection, std::size_t server) {
    auto to_server = push;
    to_server.gradients = shards[server];
    for (std::size_t table = 0; table < ends.size(); ++table) {
      const auto begin = server == 0 ? 0 : ends[table][server - 1];
      const auto& [ids, values] = push.rows[table];
      to_server.rows[table] = {ids.subspan(begin, ends[table][server] - begin),
                               values + begin * tables()[table].row_bytes()};
    }
    try {
      connection.push(std::move(to_server), deadline);
    } catch (const IncompleteUpdate&) {  // one of two copies
      ++updated;
      throw;
    }
    ++updated;
  };
  try {
    on_all(push_to);
  } catch (const std::exception& error) {  // when all have ended
    if (updated == 0) throw;
    throw IncompleteUpdate(text("step ", push.task.step, " has updated variables on ", updated.load(), " of ",
                                servers(), " servers: ", error.what()));
  }
}

}  // namespace lockstep::parameter_server
