// The implementation of Dataset: a Stage describes a step of the pipeline, a Cursor iterates over one epoch of it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep::internal {

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

// Immutable but for caches. Any thread may call any method.
class Stage {
 public:
  virtual ~Stage() = default;
  virtual std::unique_ptr<Cursor> open(std::int64_t epoch) const = 0;
  virtual std::int64_t cardinality() const = 0;

  // Stores the first element of the epoch in `row`; false where there is none.
  virtual bool first(std::int64_t epoch, Row& row) const { return open(epoch)->next(row); }
  virtual bool lies_in_memory() const { return false; }  // elements are rows of tables, or batches of rows

  // The number of files that elements are read from; 0 for other sources. over_files returns this pipeline over every
  // `num_shards`-th file, from `index` on; null where there are no files.
  virtual std::int64_t files() const { return 0; }
  virtual std::shared_ptr<const Stage> over_files(std::int64_t /*num_shards*/, std::int64_t /*index*/) const {
    return nullptr;
  }
};

}  // namespace lockstep::internal

namespace lockstep::data {

using internal::Cursor;
using internal::Row;
using internal::Stage;
using StagePtr = std::shared_ptr<const Stage>;

// A stage with an input, to which it forwards what it does not override. `Self` can be copied.
template <class Self>
class StageOver : public Stage {
 public:
  explicit StageOver(StagePtr input) : input_(std::move(input)) {}
  std::int64_t cardinality() const override { return input_->cardinality(); }
  bool lies_in_memory() const override { return input_->lies_in_memory(); }
  std::int64_t files() const override { return input_->files(); }
  StagePtr over_files(std::int64_t num_shards, std::int64_t index) const override {
    auto copy = std::make_shared<Self>(static_cast<const Self&>(*this));
    copy->input_ = input_->over_files(num_shards, index);
    return copy->input_ == nullptr ? nullptr : copy;
  }

 protected:
  StagePtr input_;
};

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
