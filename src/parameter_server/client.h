// The variables of a model on its servers, as another process reads and updates them.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/collective/group.h"
#include "parameter_server/service.h"
#include "parameter_server/shard_places.h"

namespace lockstep::parameter_server {

inline constexpr const char* kOutsideOfStep =
    "an update with parameter servers outside of a step that the chief gave out: train by fit, or in a step of a "
    "ClusterCoordinator";

// One thread at a time. Throws what the connections throw; `push`: IncompleteUpdate.
class Client {
 public:
  // `connections[s]`: to server s. `number`: the model's among those of the job. `states`: the names of the
  // optimizer's.
  Client(ModelSpec model, std::vector<ShardPlace> places, std::vector<std::shared_ptr<ServerConnection>> connections,
         std::int64_t number = 0, std::vector<std::string> states = {});

  std::int64_t model() const { return number_; }
  const std::vector<TableSpec>& tables() const { return model_.tables; }
  int servers() const { return static_cast<int>(connections_.size()); }

  // As ServerConnection's.
  void open(const std::string& description, Deadline deadline) const;

  // Zeroed memory for what is pulled and pushed, which servers on this host access where it lies.
  Memory share(std::size_t bytes, Deadline deadline) const;

  // As share, for rows of tables: not zeroed, and used again when the last copy has gone. Any thread.
  Memory share_rows(std::size_t bytes, Deadline deadline) const;

  // Values of whole variables, by their numbers: from the servers, and to them. `versions`: what `values` have by an
  // earlier pull, as ServerConnection's, of each server; empty: nothing. Returns whether any has changed.
  using Versions = std::vector<std::vector<std::int64_t>>;
  bool pull(std::span<std::byte* const> values, Versions& versions, Deadline deadline) const;
  void write(std::span<const std::byte* const> values, Deadline deadline) const;

  // Rows of a table, by their ids, which are ordered by server_of_row: [ids, width]. Any thread. Throws InvalidArgument
  // for an id that is out of range.
  void pull_rows(std::size_t table, std::span<const std::int64_t> ids, std::byte* values, Deadline deadline) const;

  // For checkpoints, on all servers, as ServerConnection's. `save` writes a file a server into `folder`, which all
  // processes must see, and lists the files in the main file. Throws IoError.
  bool cut(std::int64_t end, Deadline deadline) const;
  std::optional<std::int64_t> save(std::int64_t end, const std::filesystem::path& folder, Archive& main,
                                   Deadline deadline) const;

  // The first changes nothing, and throws where the second would.
  void check_restore(const std::string& checkpoint, Deadline deadline) const;
  void restore(const std::string& checkpoint, std::int64_t chief, Deadline deadline) const;

  // The task whose gradients are pushed next. After `end` none are.
  void begin(const Assignment& assignment);
  void end() { next_.reset(); }

  // Gradients of whole variables, by their numbers; null where a variable took no part. `push` has its weight and
  // memory, and the rows of all tables, each table's ordered by server_of_row. Once for each `begin`; throws
  // InvalidArgument without.
  void push(Push push, std::span<const std::byte* const> gradients, Deadline deadline);

 private:
  // [server]: where each of the server's shards begins in `variables`.
  template <class Byte>
  std::vector<std::vector<Byte*>> by_servers(std::span<Byte* const> variables) const;

  // Calls act(connection, its number) for all servers at once.
  template <class Act>
  void on_all(const Act& act) const;

  const ModelSpec model_;
  const std::vector<ShardPlace> places_;
  const std::vector<std::shared_ptr<ServerConnection>> connections_;
  const std::int64_t number_;
  const std::vector<std::string> states_;
  std::optional<Push> next_;  // without gradients

  struct RowMemory;
  const std::shared_ptr<RowMemory> row_memory_;
};

}  // namespace lockstep::parameter_server
