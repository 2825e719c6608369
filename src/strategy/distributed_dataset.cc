#include "lockstep/distributed_dataset.h"

#include <algorithm>

#include "lockstep/error.h"
#include "strategy/split.h"

namespace lockstep {
namespace {

Tensor rows(const Tensor& tensor, std::int64_t begin, std::int64_t count) {
  return tensor.defined() ? tensor.narrow(0, begin, count) : tensor;
}

Example part_of(const Example& batch, std::int64_t begin, std::int64_t count) {
  return {rows(batch.x, begin, count), rows(batch.y, begin, count), rows(batch.weight, begin, count)};
}

}  // namespace

PerReplica<Example> split_batch(const Example& batch, int replicas) {
  if (!batch.x.defined() || batch.x.dim() == 0) {
    throw InvalidArgument(
        "the data set's elements have no leading dimension to split among replicas; call batch() on it first");
  }
  std::vector<Example> parts;
  const auto share = batch.size() / replicas;
  const auto larger = batch.size() % replicas;
  for (int replica = 0; replica < replicas; ++replica) {
    const auto begin = share * replica + std::min<std::int64_t>(replica, larger);
    parts.push_back(part_of(batch, begin, share + (replica < larger ? 1 : 0)));
  }
  return PerReplica<Example>(std::move(parts));
}

Example empty_like(const Example& batch) { return part_of(batch, 0, 0); }

std::optional<PerReplica<Example>> DistributedIterator::next() {
  auto batch = input_.next();
  if (!batch) return std::nullopt;
  if (kind_ == Kind::split) return split_batch(*batch, replicas_);
  std::vector<Example> parts{*std::move(batch)};
  while (static_cast<int>(parts.size()) < replicas_) {
    batch = input_.next();
    parts.push_back(batch ? *std::move(batch) : empty_like(parts[0]));
  }
  return PerReplica<Example>(std::move(parts));
}

std::int64_t DistributedDataset::cardinality() const {
  const auto batches = dataset_.cardinality();
  return kind_ == DistributedIterator::Kind::split || batches < 0 ? batches : (batches + replicas_ - 1) / replicas_;
}

}  // namespace lockstep
