#include "gradient/sharded.h"

#include <ATen/core/grad_mode.h>

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
  std::vector<std::vector<Shard>> shards(static_cast<std::size_t>(ranks().size()));
  for (const auto& bucket : buckets().scattered()) {
    const auto& first = parameters_.slots()[slot_of(bucket.first_slot)];
    const auto count = std::accumulate(bucket.counts.begin(), bucket.counts.end(), std::size_t{0});
    ranges_.push_back({first.dtype, first.offset, static_cast<std::int64_t>(count), bucket.counts});
    for (std::size_t rank = 0; rank < shards.size(); ++rank) {
      for (const auto& shard : bucket.shards[rank]) {
        shards[rank].push_back({slot_of(shard.slot), shard.begin, shard.count});
      }
    }
  }
  shards_.emplace(parameters_, ranks(), std::move(shards));
  parameters_.move_first_copy(ranks());
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

}  // namespace lockstep::gradient
