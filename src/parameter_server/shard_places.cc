#include "parameter_server/shard_places.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/text.h"
#include "checkpoint/sharded_archive.h"
#include "lockstep/base/error.h"
#include "lockstep/parameter_server/partitioner.h"

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

namespace lockstep::parameter_server {

namespace {

std::int64_t shards_of(const VariableSpec& variable, const Partitioner& partitioner) {
  if (!partitioner || variable.shape.empty()) return 1;
  const auto shards = partitioner(variable.shape, variable.dtype);
  if (shards < 1 || shards > variable.shape[0]) {
    throw InvalidArgument(text("the partitioner cuts \"", variable.name, "\" into ", shards, " shards; it has ",
                               variable.shape[0], " rows, so from 1 to ", variable.shape[0], " are possible"));
  }
  return shards;
}

}  // namespace

std::vector<ShardPlace> place_shards(const std::vector<VariableSpec>& variables, const Partitioner& partitioner,
                                     int servers) {
  if (servers < 1) throw InvalidArgument(text("there are ", servers, " parameter servers; there must be at least 1"));
  std::vector<ShardPlace> places;
  for (std::size_t i = 0; i < variables.size(); ++i) {
    const auto& shape = variables[i].shape;
    const auto shards = shards_of(variables[i], partitioner);
    const auto rows = shape.empty() ? 1 : shape[0];
    const auto elements = std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
    std::int64_t begin = 0;
    for (std::int64_t shard = 0; shard < shards; ++shard) {
      const auto count = (rows / shards + (shard < rows % shards ? 1 : 0)) * (elements / rows);
      places.push_back({i, begin, count});
      begin += count;
    }
  }

  const auto bytes_of = [&](const ShardPlace& place) {
    return place.count * static_cast<std::int64_t>(size_of(variables[place.variable].dtype));
  };
  std::vector<ShardPlace*> largest_first;
  for (auto& place : places) largest_first.push_back(&place);
  std::stable_sort(largest_first.begin(), largest_first.end(),
                   [&](const auto* a, const auto* b) { return bytes_of(*a) > bytes_of(*b); });
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(servers));
  for (auto* const place : largest_first) {
    const auto least = std::min_element(bytes.begin(), bytes.end());
    place->server = static_cast<int>(least - bytes.begin());
    *least += bytes_of(*place);
  }
  return places;
}

ShardRows rows_of(const std::vector<VariableSpec>& variables, const ShardPlace& place) {
  const auto& variable = variables[place.variable];
  ShardRows rows{.variable = variable.name, .end = 1, .shape = variable.shape};
  if (variable.shape.empty()) return rows;
  const auto row =
      std::accumulate(variable.shape.begin() + 1, variable.shape.end(), std::int64_t{1}, std::multiplies<>());
  rows.begin = place.begin / row;
  rows.end = rows.begin + place.count / row;
  rows.shape[0] = rows.end - rows.begin;
  return rows;
}

std::vector<std::string> names_of_states(const Optimizer& optimizer) {
  std::vector<std::string> names;
  for (const auto& spec : optimizer.rule().states()) names.push_back(spec.name);
  return names;
}

std::vector<std::string> ShardRows::tensors(const std::vector<std::string>& states) const {
  std::vector<std::string> names{variable};
  for (const auto& state : states) names.push_back(text("optimizer/", state, "/", variable));
  return names;
}

std::vector<std::string> ShardRows::names(const std::vector<std::string>& states) const {
  auto names = tensors(states);
  for (auto& name : names) name = checkpoint::name_of_rows(name, begin, end);
  return names;
}

}  // namespace lockstep::parameter_server
