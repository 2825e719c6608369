// The implementation of Dataset: a Stage describes a step of the pipeline, a Cursor iterates over one epoch of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep::internal {

// Returns change(tensor) of each tensor that the example has.
template <class Change>
Example each_of(const Example& example, const Change& change) {
  const auto changed = [&](const Tensor& tensor) { return tensor.defined() ? change(tensor) : Tensor(); };
  return {changed(example.x), changed(example.y), changed(example.weight)};
}

// Returns examples `first` to `first + count` of a batch.
inline Example rows_of(const Example& batch, std::int64_t first, std::int64_t count) {
  return each_of(
      batch, [&](const Tensor& tensor) { return count == tensor.size(0) ? tensor : tensor.narrow(0, first, count); });
}

// An element of the pipeline: a value, or row `index` or a batch of rows of a table that many elements share. Rows are
// passed on without being read, so that shuffling copies nothing, and a batch is gathered at once by its consumer.
struct Row {
  Example value;
  std::shared_ptr<const Example> table;
  std::int64_t index = 0;
  std::optional<std::vector<std::int64_t>> batch;  // indices

  Example materialize() const;  // may be a view of the table
  std::int64_t examples() const { return batch ? static_cast<std::int64_t>(batch->size()) : materialize().size(); }
};

// One thread at a time.
class Cursor {
 public:
  virtual ~Cursor() = default;

  // Stores the next element in `row`; false at the end of the epoch.
  virtual bool next(Row& row) = 0;

  // Does what `count` calls of next do, without their results.
  virtual void skip(std::int64_t count) {
    Row row;
    while (count > 0 && next(row)) --count;
  }

  // Where elements are batches: skips batches until `count` examples have passed, or to the end of the epoch. Returns
  // false where no batch begins there.
  virtual bool skip_examples(std::int64_t count) {
    Row row;
    while (count > 0 && next(row)) count -= row.examples();
    return count >= 0;
  }
};

// A cursor that is its `next` alone: a function bool(Row&).
template <class Next>
std::unique_ptr<Cursor> cursor_of(Next next) {
  class FunctionCursor final : public Cursor {
   public:
    explicit FunctionCursor(Next function) : next_(std::move(function)) {}
    bool next(Row& row) override { return next_(row); }

   private:
    Next next_;
  };
  return std::make_unique<FunctionCursor>(std::move(next));
}

// Immutable but for caches. Any thread may call the functions.
struct Stage {
  std::function<std::unique_ptr<Cursor>(std::int64_t epoch)> open;
  std::int64_t cardinality = Dataset::kUnknown;
  std::function<bool()> lies_in_memory = [] { return false; };  // elements are rows of tables, or batches of rows

  // The number of files that elements are read from; 0 for other sources. over_files returns this pipeline over every
  // `num_shards`-th file, from `index` on, where there are files.
  std::int64_t files = 0;
  std::function<std::shared_ptr<const Stage>(std::int64_t num_shards, std::int64_t index)> over_files = {};

  // Stores the first element of the epoch in `row`; false where there is none. The next cursor of the epoch begins with
  // that element. Null where no element is kept.
  std::function<bool(std::int64_t epoch, Row& row)> keep_first = {};
};

}  // namespace lockstep::internal

namespace lockstep::data {

using internal::Cursor;
using internal::cursor_of;
using internal::Row;
using internal::Stage;
using StagePtr = std::shared_ptr<const Stage>;

// Returns a stage that is like `input`, but for what change(stage, input) sets: `open`, and perhaps more.
StagePtr over(StagePtr input, std::function<void(Stage& stage, const StagePtr& input)> change);

// Returns a function for Stage::over_files that calls `make` once for each part, so that what a stage keeps stays.
decltype(Stage::over_files) made_once(decltype(Stage::over_files) make);

StagePtr make_table_stage(Example table);
StagePtr make_files_stage(std::vector<std::string> paths, std::function<Dataset(const std::string&)> read);
StagePtr make_generator_stage(std::function<Dataset::Generator()> make, std::int64_t cardinality);
StagePtr make_map_stage(StagePtr input, std::function<Example(Example)> function, MapOptions options);
StagePtr make_cache_stage(StagePtr input, const std::string& file);
StagePtr make_shuffle_stage(StagePtr input, std::int64_t buffer_size, ShuffleOptions options);
StagePtr make_batch_stage(StagePtr input, std::int64_t size, BatchOptions options);
StagePtr make_repeat_stage(StagePtr input, std::int64_t count);
StagePtr make_take_stage(StagePtr input, std::int64_t count);
StagePtr make_skip_stage(StagePtr input, std::int64_t count);
StagePtr make_shard_stage(StagePtr input, std::int64_t num_shards, std::int64_t index);
StagePtr make_kept_first_stage(StagePtr input);
StagePtr make_prefetch_stage(StagePtr input, std::int64_t buffer_size);

}  // namespace lockstep::data
