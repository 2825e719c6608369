// Partitioners: how a variable on parameter servers is cut into shards. Torch-free. Follows
// tf.distribute.experimental.partitioners.
//
// A variable is cut along its first dimension. Shard 0 has the first rows, and where the rows cannot be divided evenly
// the first shards have one more. A scalar is never cut.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "lockstep/base/buffer.h"

namespace lockstep {

// The number of shards for a variable of this shape (at least one dimension, all above 0) and dtype: from 1 to
// shape[0]. All processes of a job use equal partitioners.
using Partitioner = std::function<std::int64_t(std::span<const std::int64_t> shape, DType dtype)>;

// As many shards as given, or one a row where there are fewer rows.
class FixedShardsPartitioner {
 public:
  // Throws InvalidArgument below 1.
  explicit FixedShardsPartitioner(std::int64_t num_shards);
  std::int64_t operator()(std::span<const std::int64_t> shape, DType dtype) const;

 private:
  std::int64_t num_shards_;
};

struct MinSizePartitionerOptions {
  std::int64_t min_shard_bytes = 256 << 10;
  std::int64_t max_shards = 1;
};

// As many shards as there are, up to max_shards, when each is to have about min_shard_bytes: the size divided by it,
// rounded up.
class MinSizePartitioner {
 public:
  // Throws InvalidArgument for an option below 1.
  explicit MinSizePartitioner(MinSizePartitionerOptions options = {});
  std::int64_t operator()(std::span<const std::int64_t> shape, DType dtype) const;

 private:
  MinSizePartitionerOptions options_;
};

struct MaxSizePartitionerOptions {
  std::int64_t max_shard_bytes;
  std::optional<std::int64_t> max_shards = {};
};

// As few shards as there can be when each has at most max_shard_bytes, or one row where that is larger. There are at
// most max_shards, which may make them larger.
class MaxSizePartitioner {
 public:
  // Throws InvalidArgument for an option below 1.
  explicit MaxSizePartitioner(MaxSizePartitionerOptions options);
  std::int64_t operator()(std::span<const std::int64_t> shape, DType dtype) const;

 private:
  MaxSizePartitionerOptions options_;
};

}  // namespace lockstep
