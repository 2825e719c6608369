#include "lockstep/parameter_server/partitioner.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

std::int64_t at_least_1(const char* partitioner, const char* option, std::int64_t value) {
  if (value >= 1) return value;
  throw InvalidArgument(text(partitioner, ": ", option, " is ", value, "; it must be at least 1"));
}

std::int64_t bytes_of(std::span<const std::int64_t> shape, DType dtype) {
  return std::accumulate(shape.begin(), shape.end(), static_cast<std::int64_t>(size_of(dtype)), std::multiplies<>());
}

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

FixedShardsPartitioner::FixedShardsPartitioner(std::int64_t num_shards)
    : num_shards_(at_least_1("FixedShardsPartitioner", "num_shards", num_shards)) {}

std::int64_t FixedShardsPartitioner::operator()(std::span<const std::int64_t> shape, DType /*dtype*/) const {
  return std::min(num_shards_, shape[0]);
}

MinSizePartitioner::MinSizePartitioner(MinSizePartitionerOptions options) : options_(options) {
  at_least_1("MinSizePartitioner", "min_shard_bytes", options.min_shard_bytes);
  at_least_1("MinSizePartitioner", "max_shards", options.max_shards);
}

std::int64_t MinSizePartitioner::operator()(std::span<const std::int64_t> shape, DType dtype) const {
  return std::min({shape[0], options_.max_shards, divide_up(bytes_of(shape, dtype), options_.min_shard_bytes)});
}

MaxSizePartitioner::MaxSizePartitioner(MaxSizePartitionerOptions options) : options_(options) {
  at_least_1("MaxSizePartitioner", "max_shard_bytes", options.max_shard_bytes);
  at_least_1("MaxSizePartitioner", "max_shards", options.max_shards.value_or(1));
}

std::int64_t MaxSizePartitioner::operator()(std::span<const std::int64_t> shape, DType dtype) const {
  const auto row_bytes = bytes_of(shape.subspan(1), dtype);
  const auto rows_of_shard = std::max<std::int64_t>(1, options_.max_shard_bytes / row_bytes);
  return std::min(options_.max_shards.value_or(shape[0]), divide_up(shape[0], rows_of_shard));
}

}  // namespace lockstep
