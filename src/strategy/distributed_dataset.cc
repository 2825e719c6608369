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

// A part for each of the devices: row_for(begin, count) is its share of `size` examples.
template <class RowFor>
PerReplica<Part> shares(std::int64_t size, const std::vector<c10::Device>& devices, const RowFor& row_for) {
  const auto replicas = static_cast<std::int64_t>(devices.size());
  std::vector<Part> parts;
  std::int64_t begin = 0;
  for (std::int64_t replica = 0; replica < replicas; ++replica) {
    const auto count = size / replicas + (replica < size % replicas ? 1 : 0);
    parts.push_back({row_for(begin, count), devices[static_cast<std::size_t>(replica)]});
    begin += count;
  }
  return PerReplica<Part>(std::move(parts));
}

PerReplica<Part> split(const Row& batch, const std::vector<c10::Device>& devices) {
  if (!batch.batch) return split_batch(batch.materialize(), devices);
  const auto& indices = *batch.batch;
  return shares(static_cast<std::int64_t>(indices.size()), devices, [&](std::int64_t begin, std::int64_t count) {
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

PerReplica<Part> split_batch(const Example& batch, const std::vector<c10::Device>& devices) {
  check_batch(batch);
  return shares(batch.size(), devices,
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
  if (kind_ == Kind::split) return split(row, devices_);
  std::vector<Part> parts{{std::move(row), devices_[0]}};
  while (parts.size() < devices_.size()) {
    Row next;
    if (!input_.next(next)) next = {.value = part_of(parts[0].read(), 0, 0)};  // at the end there are too few
    parts.push_back({std::move(next), devices_[parts.size()]});
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
  const auto replicas = static_cast<std::int64_t>(devices_.size());
  return kind_ == DistributedIterator::Kind::split || batches < 0 ? batches : (batches + replicas - 1) / replicas;
}

DistributedDataset distribute_ahead(const Dataset& data, const std::vector<c10::Device>& devices) {
  const bool on_cpus = std::all_of(devices.begin(), devices.end(), [](auto device) { return device.is_cpu(); });
  const bool left = on_cpus && data.lies_in_memory();
  return {left ? data : data.prefetch(kBatchesAhead), DistributedIterator::Kind::split, devices};
}

}  // namespace lockstep
