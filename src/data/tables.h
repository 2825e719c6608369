// Tables of examples: grown row by row, gathered into batches, cached in files, read from files of MNIST's format.
#pragma once

#include <span>
#include <string>

#include "data/stage.h"
#include "lockstep/data/dataset.h"
#include "lockstep/ops/tensor.h"

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

// A cached table as a file: a checkpoint with the tensors x, y and weight.
std::string table_file(const std::string& path);
void write_table(const std::string& path, const Example& table);
Example read_table(const std::string& path);

// The IDX format of MNIST (http://yann.lecun.com/exdb/mnist):
//
//   2 bytes       zero
//   1 byte        type: 0x08 uint8, 0x0b int16, 0x0c int32, 0x0d float, 0x0e double
//   1 byte        number of dimensions
//   4 bytes each  sizes, big endian
//   the rest      elements in row-major order, big endian
//
// The tensor in a file of uint8 elements, gzip or not. Throws IoError when it cannot be opened, DataError naming the
// file and the offset when it is not what it claims to be.
Tensor read_idx(const std::string& path);

}  // namespace lockstep::data
