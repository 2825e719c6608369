#include "lockstep/distributed_dataset.h"

#include <algorithm>

#include "base/text.h"
#include "lockstep/error.h"
#include "strategy/split.h"

namespace lockstep {
namespace {

Tensor rows(const Tensor& tensor, std::int64_t begin, std::int64_t count) {
  const bool whole = !tensor.defined() || count == tensor.size(0);
  return whole ? tensor : tensor.narrow(0, begin, count);
}

Example part_of(const Example& batch, std::int64_t begin, std::int64_t count) {
  return {rows(batch.x, begin, count), rows(batch.y, begin, count), rows(batch.weight, begin, count)};
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
  const auto replicas = static_cast<int>(devices.size());
  const auto share = batch.size() / replicas;
  const auto larger = batch.size() % replicas;
  for (int replica = 0; replica < replicas; ++replica) {
    const auto begin = share * replica + std::min<std::int64_t>(replica, larger);
    const auto part = part_of(batch, begin, share + (replica < larger ? 1 : 0));
    parts.push_back(moved(part, devices[static_cast<std::size_t>(replica)]));
  }
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
  auto batch = input_.next();
  if (!batch) return std::nullopt;
  if (kind_ == Kind::split) return split_batch(*batch, devices_);
  std::vector<Example> parts{moved(*batch, devices_[0])};
  while (parts.size() < devices_.size()) {
    batch = input_.next();
    parts.push_back(moved(batch ? *batch : empty_like(parts[0]), devices_[parts.size()]));
  }
  return PerReplica<Example>(std::move(parts));
}

std::int64_t DistributedDataset::cardinality() const {
  const auto batches = dataset_.cardinality();
  const auto replicas = static_cast<std::int64_t>(devices_.size());
  return kind_ == DistributedIterator::Kind::split || batches < 0 ? batches : (batches + replicas - 1) / replicas;
}

}  // namespace lockstep
