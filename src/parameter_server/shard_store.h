// All shards of one model on one server, and its rows of the model's tables.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "checkpoint/sharded_archive.h"
#include "parameter_server/applied_steps.h"
#include "parameter_server/push.h"
#include "parameter_server/shard.h"
#include "parameter_server/shard_places.h"
#include "parameter_server/table_shard.h"

namespace lockstep::parameter_server {

// Any thread may call.
class ShardStore {
 public:
  // The shards of `server`, in the order of `places`. Their values are 0 until they are written.
  ShardStore(const ModelSpec& model, const std::vector<ShardPlace>& places, ServerNumber server,
             const Optimizer& optimizer, const UpdateMode& mode);

  std::size_t size() const { return shards_.size(); }
  Shard& shard(std::size_t index) { return *shards_[index]; }
  const Shard& shard(std::size_t index) const { return *shards_[index]; }

  // Throws InvalidArgument for a number that is not below tables().
  std::size_t tables() const { return tables_.size(); }
  const TableShard& table(std::size_t number) const;

  PushSizes sizes() const;

  // Updates each shard and each table that the step has not updated yet by the push's gradients, divided by its weight.
  // With several parts: once enough have come, by those of all, added in the order of parts and divided by the sum of
  // their weights. A push may be repeated; one of an earlier chief than another push or restore is ignored. Returns the
  // number of the last transfer before it. Throws InvalidArgument for one that does not fit.
  std::int64_t push(Push push);

  // Copies the values of all shards, as Shard::read: those whose `versions`, of an earlier call, are not the latest.
  void pull(std::span<std::byte* const> values, std::vector<std::int64_t>& versions) const;

  // Replaces the values of all shards. Returns as `push`.
  std::int64_t write(std::span<const std::byte* const> values);

  // Gives another server its state, while pushes and writes wait: everything but a cut. Transfers of the two copies of
  // shards have ascending numbers: throws InvalidArgument for one below the last. What `receive` has begun to replace
  // is not whole if it throws.
  void send(std::int64_t transfer, StateWriter& to);
  void receive(StateReader& from);

  // A moment that a checkpoint keeps: the steps below `end`, of which some may still be pushed, and no others.
  void cut(std::int64_t end);

  // Writes that moment to a file, when those steps have been pushed, or never will be. `end` may be below the cut's.
  // Returns how many of them were applied; nothing, and no file is written, where there was no cut. Throws IoError.
  std::optional<std::int64_t> save(std::int64_t end, const std::string& file);

  // Replaces everything by what a checkpoint has after `steps`; from then on pushes of chiefs before number `chief` are
  // ignored. Without a chief, only checks that this is possible. Throws as ShardedArchive::rows, and InvalidArgument
  // where something has another dtype or size; then nothing has changed. Returns as `push`.
  std::int64_t restore(checkpoint::ShardedArchive& archive, const SavedSteps& steps, std::optional<std::int64_t> chief);

 private:
  void check(const Push& push) const;
  void update(Push push);
  void apply(std::span<const Push> parts);
  void apply_to_table(std::size_t number, std::span<const Push> parts, double weight);

  const ServerNumber server_;
  const UpdateMode mode_;
  const std::vector<std::string> states_;  // names of the optimizer's
  std::vector<ShardRows> rows_;            // [shard]
  std::vector<std::unique_ptr<Shard>> shards_;
  std::vector<std::unique_ptr<TableShard>> tables_;

  // Shared by pushes, and held alone by what replaces or copies everything.
  std::shared_mutex changes_;
  std::int64_t last_transfer_ = 0;  // guarded by changes_

  Mutex mutex_;
  StepParts parts_ LOCKSTEP_GUARDED_BY(mutex_);
  std::atomic<std::int64_t> chief_ = 0;
};

}  // namespace lockstep::parameter_server
