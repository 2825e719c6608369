// A server's shards as another process has them, without calls between processes.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "checkpoint/sharded_archive.h"
#include "parameter_server/server_checkpoint.h"
#include "parameter_server/service.h"
#include "parameter_server/shard_store.h"

namespace lockstep::parameter_server {

class ConnectionInProcess : public ServerConnection {
 public:
  explicit ConnectionInProcess(std::shared_ptr<ShardStore> of) : store(std::move(of)) {}

  std::shared_ptr<ShardStore> store;

  void open(const std::string&, Deadline) override {}
  bool share(std::shared_ptr<SharedBlock>, Deadline) override { return true; }
  std::int64_t write(std::span<const std::byte* const> shards, Deadline) override { return store->write(shards); }
  std::int64_t push(Push push, Deadline) override { return store->push(std::move(push)); }
  void pull_rows(std::size_t table, std::span<const std::int64_t> ids, std::span<std::byte> values, Deadline) override {
    store->table(table).read(ids, values.data());
  }
  void pull(std::span<std::byte* const> shards, std::vector<std::int64_t>& versions, Deadline) override {
    store->pull(shards, versions);
  }
  bool cut(std::int64_t end, Deadline) override {
    store->cut(end);
    return true;
  }
  std::optional<std::int64_t> save(std::int64_t end, const std::string& file, Deadline) override {
    return store->save(end, file);
  }
  std::int64_t restore(const std::string& path, std::optional<std::int64_t> chief, Deadline) override {
    checkpoint::ShardedArchive archive(path);
    return store->restore(archive, saved_steps_of(archive.main()), chief);
  }
};

}  // namespace lockstep::parameter_server
