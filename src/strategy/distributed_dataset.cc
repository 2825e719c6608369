#include "lockstep/distributed_dataset.h"

#include "base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

Tensor rows(const Tensor& tensor, std::int64_t begin, std::int64_t count) {
  return tensor.defined() ? tensor.narrow(0, begin, count) : tensor;
}

Example part_of(const Example& batch, std::int64_t begin, std::int64_t count) {
  return {rows(batch.x, begin, count), rows(batch.y, begin, count), rows(batch.weight, begin, count)};
}

}  // namespace

std::optional<PerReplica<Example>> DistributedIterator::next() {
  auto batch = input_.next();
  if (!batch) return std::nullopt;
  if (!batch->x.defined() || batch->x.dim() == 0) {
    throw InvalidArgument("the data set's elements have no leading dimension to split among replicas; call batch() on it first");
  }
  std::vector<Example> parts;
  for (int replica = 0; replica < replicas_; ++replica) {
    if (kind_ == Kind::split) {
      // The first `size % replicas` parts are one larger.
      const auto size = batch->size();
      const auto begin = size / replicas_ * replica + std::min<std::int64_t>(replica, size % replicas_);
      parts.push_back(part_of(*batch, begin, size / replicas_ + (replica < size % replicas_ ? 1 : 0)));
    } else {
      if (replica > 0) batch = input_.next();
      parts.push_back(batch ? *batch : part_of(parts[0], 0, 0));
    }
  }
  return PerReplica<Example>(std::move(parts));
}

std::int64_t DistributedDataset::cardinality() const {
  const auto batches = dataset_.cardinality();
  return kind_ == DistributedIterator::Kind::split || batches < 0 ? batches : (batches + replicas_ - 1) / replicas_;
}

}  // namespace lockstep
