#include "lockstep/distributed_dataset.h"

#include <algorithm>

#include "base/text.h"
#include "data/stage.h"
#include "lockstep/error.h"
#include "strategy/split.h"
#include "strategy/strategy_impl.h"

namespace lockstep {
namespace {

Tensor rows(const Tensor& tensor, std::int64_t begin, std::int64_t count) {
  const bool whole = !tensor.defined() || count == tensor.size(0);
  return whole ? tensor : tensor.narrow(0, begin, count);
}

Example part_of(const Example& batch, std::int64_t begin, std::int64_t count) {
  return {rows(batch.x, begin, count), rows(batch.y, begin, count), rows(batch.weight, begin, count)};
}

// Calls visit(replica, begin, count) for each replica's share of `size` examples.
template <class Visit>
void for_each_share(std::int64_t size, int replicas, const Visit& visit) {
  const auto share = size / replicas, larger = size % replicas;
  for (int replica = 0; replica < replicas; ++replica) {
    visit(replica, share * replica + std::min<std::int64_t>(replica, larger), share + (replica < larger ? 1 : 0));
  }
}

// A batch of rows of a table as one a replica.
std::vector<Row> split_rows(const Row& batch, int replicas) {
  std::vector<Row> rows;
  for_each_share(static_cast<std::int64_t>(batch.batch->size()), replicas,
                 [&](int, std::int64_t begin, std::int64_t count) {
                   const auto first = batch.batch->begin() + begin;
                   rows.push_back({.table = batch.table, .batch = std::vector(first, first + count)});
                 });
  return rows;
}

}  // namespace

Tensor moved(const Tensor& tensor, c10::Device device) { return tensor.defined() ? tensor.to(device) : tensor; }

Example moved(const Example& example, c10::Device device) {
  if (device.is_cpu() && (!example.x.defined() || example.x.device().is_cpu())) return example;
  return {moved(example.x, device), moved(example.y, device), moved(example.weight, device)};
}

PerReplica<Example> split_batch(const Example& batch, const std::vector<c10::Device>& devices) {
  check_batch(batch);
  std::vector<Example> parts;
  for_each_share(batch.size(), static_cast<int>(devices.size()),
                 [&](int replica, std::int64_t begin, std::int64_t count) {
                   parts.push_back(moved(part_of(batch, begin, count), devices[static_cast<std::size_t>(replica)]));
                 });
  return PerReplica<Example>(std::move(parts));
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

Example empty_like(const Example& batch) { return part_of(batch, 0, 0); }

std::optional<PerReplica<Example>> DistributedIterator::next() {
  const auto& devices = strategy_->torch_devices();
  Row row;
  if (!input_.next(row)) return std::nullopt;
  if (kind_ == Kind::split && !row.batch) return split_batch(row.materialize(), devices);
  const auto rows = kind_ == Kind::split ? split_rows(row, strategy_->replicas()) : one_each(std::move(row));
  std::vector<Example> parts(rows.size());
  strategy_->on_replicas([&](int replica) {
    const auto i = static_cast<std::size_t>(replica);
    parts[i] = moved(rows[i].materialize(), devices[i]);
  });
  return PerReplica<Example>(std::move(parts));
}

// An element for each replica, without examples where there are too few.
std::vector<Row> DistributedIterator::one_each(Row first) {
  std::vector<Row> rows{std::move(first)};
  while (rows.size() < strategy_->torch_devices().size()) {
    Row row;
    if (!input_.next(row)) row = {.value = empty_like(rows[0].materialize())};
    rows.push_back(std::move(row));
  }
  return rows;
}

std::int64_t DistributedDataset::cardinality() const {
  const auto batches = dataset_.cardinality();
  const std::int64_t replicas = strategy_->replicas();
  return kind_ == DistributedIterator::Kind::split || batches < 0 ? batches : (batches + replicas - 1) / replicas;
}

}  // namespace lockstep
