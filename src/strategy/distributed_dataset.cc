#include "lockstep/distributed_dataset.h"

#include <algorithm>

#include "base/text.h"
#include "lockstep/error.h"
#include "strategy/split.h"

namespace lockstep {
namespace {

constexpr std::int64_t kBatchesAhead = 2;

Tensor rows(const Tensor& tensor, std::int64_t begin, std::int64_t count) {
  const bool whole = !tensor.defined() || count == tensor.size(0);
  return whole ? tensor : tensor.narrow(0, begin, count);
}

Example part_of(const Example& batch, std::int64_t begin, std::int64_t count) {
  return {rows(batch.x, begin, count), rows(batch.y, begin, count), rows(batch.weight, begin, count)};
}

Tensor moved(const Tensor& tensor, c10::Device device) { return tensor.defined() ? tensor.to(device) : tensor; }

// A part for each of this process's replicas: row_for(begin, count) is its share of `size` examples.
template <class RowFor>
PerReplica<Part> shares(std::int64_t size, const LocalReplicas& replicas, const RowFor& row_for) {
  const std::int64_t each = size / replicas.all, larger = size % replicas.all;
  std::vector<Part> parts;
  for (std::size_t i = 0; i < replicas.devices.size(); ++i) {
    const auto replica = replicas.first + static_cast<std::int64_t>(i);
    const auto begin = each * replica + std::min(replica, larger);
    parts.push_back({row_for(begin, each + (replica < larger ? 1 : 0)), replicas.devices[i]});
  }
  return PerReplica<Part>(std::move(parts));
}

PerReplica<Part> split(const Row& batch, const LocalReplicas& replicas) {
  if (!batch.batch) return split_batch(batch.materialize(), replicas);
  const auto& indices = *batch.batch;
  return shares(static_cast<std::int64_t>(indices.size()), replicas, [&](std::int64_t begin, std::int64_t count) {
    const auto first = indices.begin() + begin;
    return Row{.table = batch.table, .batch = std::vector(first, first + count)};
  });
}

}  // namespace

Example internal::Part::read() const {
  const auto example = row.materialize();
  const bool there = device.is_cpu() && (!example.x.defined() || example.x.device().is_cpu());
  if (there) return example;
  return {moved(example.x, device), moved(example.y, device), moved(example.weight, device)};
}

PerReplica<Part> split_batch(const Example& batch, const LocalReplicas& replicas) {
  check_batch(batch);
  return shares(batch.size(), replicas,
                [&](std::int64_t begin, std::int64_t count) { return Row{.value = part_of(batch, begin, count)}; });
}

void check_batch(const Example& batch) {
  if (!batch.x.defined()) throw InvalidArgument("an element of the data set has no x");
  const auto shape_of = [](const Tensor& tensor) {
    return tensor.defined() ? text(tensor.sizes()) : std::string("none");
  };
  const auto fits = [&](const Tensor& tensor) {
    return !tensor.defined() || (tensor.dim() > 0 && tensor.size(0) == batch.size());
  };
  if (batch.x.dim() > 0 && fits(batch.y) && fits(batch.weight)) return;
  throw InvalidArgument(text("the data set's elements are no batches (x has shape ", shape_of(batch.x), ", y ",
                             shape_of(batch.y), ", weight ", shape_of(batch.weight), "); call batch() on it first"));
}

std::optional<PerReplica<Part>> DistributedIterator::next_parts() {
  Row row;
  if (!input_.next(row)) return std::nullopt;
  if (kind_ == Kind::split) return split(row, replicas_);
  const auto& devices = replicas_.devices;
  std::vector<Part> parts{{std::move(row), devices[0]}};
  while (parts.size() < devices.size()) {
    Row next;
    if (!input_.next(next)) next = {.value = part_of(parts[0].read(), 0, 0)};  // at the end there are too few
    parts.push_back({std::move(next), devices[parts.size()]});
  }
  return PerReplica<Part>(std::move(parts));
}

std::optional<PerReplica<Example>> DistributedIterator::next() {
  const auto parts = next_parts();
  if (!parts) return std::nullopt;
  std::vector<Example> examples;
  for (const auto& part : *parts) examples.push_back(part.read());
  return PerReplica<Example>(std::move(examples));
}

std::int64_t DistributedDataset::cardinality() const {
  const auto batches = dataset_.cardinality();
  const auto replicas = static_cast<std::int64_t>(replicas_.devices.size());
  return kind_ == DistributedIterator::Kind::split || batches < 0 ? batches : (batches + replicas - 1) / replicas;
}

DistributedDataset distribute_ahead(const Dataset& data, const LocalReplicas& replicas) {
  const bool on_cpus =
      std::all_of(replicas.devices.begin(), replicas.devices.end(), [](auto device) { return device.is_cpu(); });
  const bool left = on_cpus && data.lies_in_memory();
  return {left ? data : data.prefetch(kBatchesAhead), DistributedIterator::Kind::split, replicas};
}

}  // namespace lockstep
