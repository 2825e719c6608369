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

int distance_of_copies(const std::vector<std::string>& hosts) {
  int best = 0;
  std::size_t most = 0;
  for (std::size_t distance = 1; distance < hosts.size(); ++distance) {
    std::size_t elsewhere = 1;  // any distance is better than none
    for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
      if (hosts[rank] != hosts[(rank + distance) % hosts.size()]) ++elsewhere;
    }
    if (elsewhere <= most) continue;
    most = elsewhere;
    best = static_cast<int>(distance);
  }
  return best;
}

Sharded::Sharded(ReplicatedParameters& parameters, Communicator ranks, BucketOptions options, Hosts hosts)
    : Bucketed(parameters, std::move(ranks), scattered(std::move(options)), /*sum=*/false),
      parameters_(parameters),
      hosts_(std::move(hosts)) {}

void Sharded::prepare() {
  Bucketed::prepare();
  lay_out();
}

void Sharded::regroup() {
  Bucketed::regroup();
  lay_out();
}

void Sharded::lay_out() {
  parameters_.move_first_copy(ranks());
  ranges_.clear();
  std::vector<std::vector<Shard>> shards(static_cast<std::size_t>(ranks().size()));
  for (const auto& bucket : buckets().scattered()) {
    const auto& first = parameters_.slots()[slot_of(bucket.first_slot)];
    const auto count = std::accumulate(bucket.counts.begin(), bucket.counts.end(), std::size_t{0});
    ranges_.push_back({first.dtype, first.offset, static_cast<std::int64_t>(count), bucket.counts, bucket.mean});
    for (std::size_t rank = 0; rank < shards.size(); ++rank) {
      for (const auto& shard : bucket.shards[rank]) {
        shards[rank].push_back({slot_of(shard.slot), shard.begin, shard.count});
      }
    }
  }
  shards_.emplace(parameters_, ranks(), std::move(shards), hosts_ ? distance_of_copies(hosts_()) : 0);
}

void Sharded::reduce() {
  Bucketed::reduce();
  if (hosts_ && ranks().size() > 1) copy_sums();
}

// A rank's sums to the one that has copies of its shards.
void Sharded::copy_sums() {
  const int rank = ranks().rank(), to = shards_->copy_of(rank), from = shards_->copied_by(rank);
  std::vector<Call> calls;
  for (const auto& range : ranges_) {
    const auto part_of = [&](int owner) {
      const auto part = collective::share_of(range.counts, 0, owner);
      auto* const sums = static_cast<std::byte*>(range.sums.mutable_data_ptr());
      const auto dtype = ops::dtype_of(range.dtype);
      return Buffer{sums + part.begin * size_of(dtype), part.count(), dtype};
    };
    const auto mine = part_of(rank), theirs = part_of(from);
    if (mine.count > 0) calls.push_back(Call::send(mine, to));
    if (theirs.count > 0) calls.push_back(Call::recv(theirs, from));
  }
  ranks().group().run(calls, ranks().deadline());
}

at::Tensor Sharded::first_copy(const Range& range) const {
  return parameters_.flat(0, range.dtype).narrow(0, range.begin, range.count);
}

void Sharded::publish(const Group& replicas, Deadline deadline) {
  const int replica = replicas.rank();
  replicas.barrier(deadline);                          // all shards of this process are updated
  const bool has_all = hosts_ && ranks().size() <= 2;  // its own and the copies
  if (replica == 0 && !has_all) gather();
  replicas.barrier(deadline);
  if (replica == 0 || replica >= parameters_.copies()) return;
  const at::NoGradGuard no_grad;
  for (const auto& range : ranges_) {
    parameters_.flat(replica, range.dtype).narrow(0, range.begin, range.count).copy_(first_copy(range));
  }
}

void Sharded::publish_between_steps() {
  gather();
  parameters_.spread_first_copy();
}

void Sharded::gather() {
  for (const auto& range : ranges_) gather_in_place(ranks(), first_copy(range), range.counts);
}

}  // namespace lockstep::gradient
