// Grows tables row by row, and gathers rows into batches.
#pragma once

#include <span>

#include "data/stage.h"

namespace lockstep::data {

// Copies examples of one shape into one tensor each for x, y and weight. One thread.
class TableBuilder {
 public:
  // `capacity` rows are reserved; more are allocated when needed.
  explicit TableBuilder(std::int64_t capacity) : capacity_(capacity) {}

  // Throws InvalidArgument when the example's shapes or dtypes differ from those of the first.
  void append(const Example& example);

  std::int64_t size() const { return size_; }
  Example finish() const;

 private:
  std::int64_t capacity_;
  std::int64_t size_ = 0;
  Example table_;
};

// The table's rows at these indices, stacked.
Example gather_rows(const Example& table, std::span<const std::int64_t> indices);

// The rows as one batch: rows of one table stay in it, others are copied. Throws InvalidArgument when shapes differ.
Row batch_of(std::span<const Row> rows);

}  // namespace lockstep::data
