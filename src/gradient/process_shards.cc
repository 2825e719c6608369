#include "gradient/process_shards.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "ops/dtypes.h"

namespace lockstep::gradient {

ProcessShards::ProcessShards(const ReplicatedParameters& parameters, Communicator ranks,
                             std::vector<std::vector<Shard>> shards, int distance)
    : parameters_(parameters), ranks_(std::move(ranks)), shards_(std::move(shards)), distance_(distance) {}

ShardMap ProcessShards::map_of(std::vector<Shard> shards) const {
  return ShardMap::even(std::move(shards), parameters_.replicas());
}

ShardMap ProcessShards::of_this_process() const { return map_of(shards_[static_cast<std::size_t>(ranks_.rank())]); }

ShardMap ProcessShards::copies() const {
  if (distance_ == 0) return map_of({});
  return map_of(shards_[static_cast<std::size_t>(copied_by(ranks_.rank()))]);
}

std::vector<std::vector<Shard>> ProcessShards::held() const {
  auto held = shards_;
  for (int rank = 0; distance_ != 0 && rank < size(); ++rank) {
    const auto& copied = shards_[static_cast<std::size_t>(copied_by(rank))];
    auto& of_rank = held[static_cast<std::size_t>(rank)];
    of_rank.insert(of_rank.end(), copied.begin(), copied.end());
  }
  return held;
}

void ProcessShards::sum_over_owners(std::span<double> values, const Group& replicas, Deadline deadline) const {
  replicas.all_reduce(buffer_of(values), ReduceOp::sum, deadline);
  if (replicas.rank() == 0) ranks_.sum(values);
  replicas.broadcast(buffer_of(values), 0, deadline);
}

at::Tensor ProcessShards::gather_from_owners(std::size_t slot, const at::Tensor& own) const {
  const auto& info = parameters_.slots()[slot];
  Counts counts;
  for (const auto& shards : shards_) {
    const auto shard = std::find_if(shards.begin(), shards.end(), [&](const Shard& one) { return one.slot == slot; });
    counts.push_back(shard == shards.end() ? 0 : static_cast<std::size_t>(shard->count));
  }
  const auto whole = ranks_.rank() == 0 ? at::empty(info.sizes, own.options()) : at::Tensor();
  const auto dtype = ops::dtype_of(info.dtype);
  const Buffer output{whole.defined() ? whole.data_ptr() : nullptr,
                      whole.defined() ? static_cast<std::size_t>(info.numel) : 0, dtype};
  ranks_.group().run(
      Call::gather({own.data_ptr(), static_cast<std::size_t>(own.numel()), dtype}, output, /*root=*/0, counts),
      ranks_.deadline());
  return whole;
}

}  // namespace lockstep::gradient
