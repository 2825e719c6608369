// A server's rows of one table, with the optimizer's state of each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "checkpoint/sharded_archive.h"
#include "lockstep/optimizer/optimizer.h"
#include "parameter_server/applied_steps.h"
#include "parameter_server/table.h"

namespace lockstep::parameter_server {

// Rows are made by their first update, so that only trained rows need memory; any other row reads as its initial
// values. A step moves the rows for which it has gradients, and their state; other rows and their state stay (as
// LazyAdam of TensorFlow Addons). The number of steps, by which the optimizer computes, is the table's. Row admission
// and eviction follow Monolith (Liu et al. 2022). Any thread may call.
class TableShard {
 public:
  // Throws InvalidArgument as check(table) and require_shardable.
  TableShard(TableSpec table, Optimizer optimizer);

  const TableSpec& table() const { return table_; }

  // Copies rows to `values`: [ids, width]. Throws InvalidArgument for an id that is out of range.
  void read(std::span<const std::int64_t> ids, std::byte* values) const;

  // Updates the rows by their gradients, divided by `divide_by`, unless the step was applied before: then false. Throws
  // InvalidArgument for an id that is out of range; then nothing has changed. `learning_rate`: as Push's.
  bool apply(std::int64_t step, const Rows& gradients, double divide_by, std::optional<double> learning_rate);

  // As AppliedSteps'.
  void close_below(std::int64_t end);

  std::size_t size() const;      // rows that it has
  std::int64_t version() const;  // steps that were applied

  // A checkpoint has this of a row: the number of its last update, and its values and states, in this order.
  struct StoredRow {
    std::int64_t id = 0;
    std::int64_t last_update = 0;
    const std::byte* data = nullptr;
  };

  // As Shard's. For a checkpoint that is written while rows are updated: rows that later steps change are copied.
  void cut(std::int64_t end);

  // A cut whose rows are final.
  struct ClosedCut {
    std::int64_t number = 0;
    std::size_t rows = 0;
    std::int64_t updates = 0;  // steps that were applied
  };
  // No other step below `end` is applied from now on: as Shard::take_cut. Nothing where there was no cut.
  std::optional<ClosedCut> close_cut(std::int64_t end);

  // Calls act for each row of the cut, in one order at each call. The lock is held for about a megabyte of rows at a
  // time; in between, rows are updated. Throws Error where another cut has come since.
  void for_each(const ClosedCut& cut, const std::function<void(const StoredRow& row)>& act) const;
  void end_cut(const ClosedCut& cut);

  // Replaces everything: clear(), then add_row for each, in any order, then begin_at(steps).
  void clear();
  void add_row(const StoredRow& row);
  void begin_at(const SavedSteps& steps);

  // As Shard's. Nothing else may change the table while it is sent.
  void send(StateWriter& to) const;
  void receive(StateReader& from);

 private:
  using Record = RowRecords::Record;

  struct Data {
    RowRecords records;
    AppliedSteps applied;
  };
  struct Cut {
    std::int64_t number = 0, end = 0;
    std::size_t rows = 0;
    Data changed;  // rows that were updated since, as the checkpoint has them
    IdMap absent;  // rows that were made since, which it does not have
  };

  Data empty() const { return {RowRecords(table_.row_bytes(), initial_state_.size()), {}}; }
  void initialize(std::int64_t id, Record record) const;

  // The rows, some that are looked up together at a time.
  std::vector<Rows> blocks_of(const Rows& rows) const;

  // Moves the rows that have a record.
  void update(std::span<const Record> records, const std::byte* gradients, const UpdateStep& step,
              double divide_by) const;

  void update_live(const Rows& gradients, const UpdateStep& step, double divide_by)
      LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));
  void update_cut(const Rows& gradients, const UpdateStep& step, double divide_by)
      LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));
  void keep_for_cut(std::span<const std::int64_t> ids, std::span<const Record> found)
      LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));
  bool admits(std::int64_t id) LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));
  void evict() LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));

  const TableSpec table_;
  const Optimizer optimizer_;
  const std::vector<double> initial_state_;  // by the rule's states()

  mutable Mutex mutex_;
  Data live_ LOCKSTEP_GUARDED_BY(mutex_);
  IdMap counts_ LOCKSTEP_GUARDED_BY(mutex_), old_counts_ LOCKSTEP_GUARDED_BY(mutex_);  // updates of rows not admitted
  std::int64_t next_forgetting_ LOCKSTEP_GUARDED_BY(mutex_) = 0;                       // of old counts
  std::size_t next_slot_ LOCKSTEP_GUARDED_BY(mutex_) = 0;                              // that may be evicted
  std::int64_t cuts_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::optional<Cut> cut_ LOCKSTEP_GUARDED_BY(mutex_);
};

// Rows of tables in checkpoints: a file a server, beside that of its shards, which is written and read a piece at a
// time. Of a table of n rows it has the tensors NAME/ids and NAME/last_update [n], NAME and optimizer/STATE/NAME
// [n, width].

// One of several servers.
struct ServerNumber {
  int index = 0, count = 1;
};

using TableShards = std::span<const std::unique_ptr<TableShard>>;

// Writes what the cuts of the tables have, and ends them. `states`: the names of the optimizer's. Returns how many
// steps were applied; nothing where there was no cut. Throws IoError.
std::optional<std::int64_t> save_tables(TableShards tables, const std::vector<std::string>& states, std::int64_t end,
                                        const std::filesystem::path& file);

// Says in a checkpoint's main file where `servers` servers have written theirs: in a folder of rows_folder.
void list_tables(Archive& main, const std::string& folder, int servers);

// Replaces the rows by those of the checkpoint that are this server's, whatever the number of servers that wrote it.
// Without `change` it only checks. Throws as ArchiveReader, and InvalidArgument where a table is missing or another
// one.
void restore_tables(TableShards tables, const std::vector<std::string>& states, ServerNumber server,
                    const checkpoint::ShardedArchive& archive, const SavedSteps& steps, bool change);

}  // namespace lockstep::parameter_server
