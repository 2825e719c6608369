#include "gradient/sharded.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <numeric>

#include "gradient/gather_in_place.h"

namespace lockstep::gradient {
namespace {

BucketOptions scattered(BucketOptions options) {
  options.scatter = true;
  return options;
}

}  // namespace

Sharded::Sharded(ReplicatedParameters& parameters, Communicator ranks, BucketOptions options)
    : Bucketed(parameters, std::move(ranks), scattered(std::move(options)), /*sum=*/false), parameters_(parameters) {}

void Sharded::prepare() {
  Bucketed::prepare();
  shards_.resize(static_cast<std::size_t>(ranks().size()));
  for (const auto& bucket : buckets().scattered()) {
    const auto& first = parameters_.slots()[slot_of(bucket.first_slot)];
    const auto count = std::accumulate(bucket.counts.begin(), bucket.counts.end(), std::size_t{0});
    ranges_.push_back({first.dtype, first.offset, static_cast<std::int64_t>(count), bucket.counts});
    for (std::size_t rank = 0; rank < shards_.size(); ++rank) {
      for (const auto& shard : bucket.shards[rank]) {
        shards_[rank].push_back({slot_of(shard.slot), shard.begin, shard.count});
      }
    }
  }
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto numel = parameters_.flat_numel(dtype);
    if (numel == 0) continue;
    const auto memory = ranks().group().allocate(static_cast<std::size_t>(numel) * at::elementSize(dtype));
    parameters_.move_first_copy(at::from_blob(
        memory.get(), {numel}, [memory](void*) {}, at::TensorOptions(dtype)));
  }
}

ShardMap Sharded::shards() const {
  return ShardMap::even(shards_[static_cast<std::size_t>(ranks().rank())], parameters_.replicas());
}

void Sharded::sum_over_owners(std::span<double> values, const Group& replicas, Deadline deadline) const {
  Bucketed::sum_over_owners(values, replicas, deadline);
  if (replicas.rank() == 0) ranks().sum(values);
  replicas.broadcast(buffer_of(values), 0, deadline);
}

at::Tensor Sharded::first_copy(const Range& range) const {
  return parameters_.flat(0, range.dtype).narrow(0, range.begin, range.count);
}

void Sharded::publish(const Group& replicas, Deadline deadline) {
  const int replica = replicas.rank();
  replicas.barrier(deadline);  // all shards of this process are updated
  if (replica == 0) {
    for (const auto& range : ranges_) gather_in_place(ranks(), first_copy(range), range.counts);
  }
  replicas.barrier(deadline);
  if (replica == 0 || replica >= parameters_.copies()) return;
  const at::NoGradGuard no_grad;
  for (const auto& range : ranges_) {
    parameters_.flat(replica, range.dtype).narrow(0, range.begin, range.count).copy_(first_copy(range));
  }
}

at::Tensor Sharded::gather_from_owners(std::size_t slot, const at::Tensor& own) const {
  const auto& info = parameters_.slots()[slot];
  Counts counts;
  for (const auto& shards : shards_) {
    const auto shard = std::find_if(shards.begin(), shards.end(), [&](const Shard& one) { return one.slot == slot; });
    counts.push_back(shard == shards.end() ? 0 : static_cast<std::size_t>(shard->count));
  }
  const auto whole = ranks().rank() == 0 ? at::empty(info.sizes, own.options()) : at::Tensor();
  const auto dtype = ops::dtype_of(info.dtype);
  const Buffer output{whole.defined() ? whole.data_ptr() : nullptr,
                      whole.defined() ? static_cast<std::size_t>(info.numel) : 0, dtype};
  ranks().group().run(
      Call::gather({own.data_ptr(), static_cast<std::size_t>(own.numel()), dtype}, output, /*root=*/0, counts),
      ranks().deadline());
  return whole;
}

}  // namespace lockstep::gradient
