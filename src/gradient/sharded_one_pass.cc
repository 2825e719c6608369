#include "gradient/sharded_one_pass.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "base/text.h"

namespace lockstep::gradient {
namespace {

std::vector<std::vector<Shard>> even_shards(const ReplicatedParameters& parameters, int ranks) {
  const auto map = ShardMap::even(parameters.trainable(), ranks);
  std::vector<std::vector<Shard>> shards;
  for (int rank = 0; rank < ranks; ++rank) shards.push_back(map.of(rank));
  return shards;
}

}  // namespace

std::unique_ptr<ShardedOnePass> ShardedOnePass::make(ReplicatedParameters& parameters, const Communicator& ranks) {
  parameters.compare_models(ranks);
  ranks.check_all_agree("numbers of replicas", std::to_string(parameters.replicas()));
  const auto bytes = parameters.flat_bytes() * static_cast<std::size_t>(parameters.replicas());
  if (bytes == 0 || !parameters.move_first_copy(ranks)) return nullptr;
  const auto parts = ranks.group().allocate_shared(bytes, ranks.deadline());
  if (parts.empty()) return nullptr;
  return std::unique_ptr<ShardedOnePass>(new ShardedOnePass(parameters, ranks, parts));
}

ShardedOnePass::ShardedOnePass(ReplicatedParameters& parameters, Communicator ranks, const std::vector<Memory>& parts)
    : OnePass(parameters),
      ranks_(std::move(ranks)),
      shards_(parameters, ranks_, even_shards(parameters, ranks_.size())),
      sources_(parameters.slots().size()) {
  for (const auto& part : parts) {
    auto& gradients = gradients_.emplace_back(static_cast<std::size_t>(parameters.replicas()));
    for (std::size_t replica = 0; replica < gradients.size(); ++replica) {
      for (const auto& slot : parameters.slots()) {
        gradients[replica].push_back(
            slot.trainable ? parameters.flat_in(part, replica, slot.dtype).narrow(0, slot.offset, slot.numel)
                           : at::Tensor());
      }
    }
  }
}

at::Tensor ShardedOnePass::memory_for(int replica, std::size_t slot) const {
  const auto& gradient = own_gradient(replica, slot);
  return gradient.defined() ? in_shape_of(parameters_.parameter(replica, slot), gradient) : at::Tensor();
}

void ShardedOnePass::on_ready(int replica, std::size_t slot, const at::Tensor& gradient) {
  const auto& shared = own_gradient(replica, slot);
  if (gradient.const_data_ptr() != shared.const_data_ptr()) {
    const at::NoGradGuard no_grad;
    shared.copy_(gradient.view({-1}));
  }
  OnePass::on_ready(replica, slot, shared);
}

void ShardedOnePass::wait(const Group& replicas, Deadline deadline) {
  if (replicas.rank() == 0) exchange_flags();
  replicas.barrier(deadline);
}

// Once all processes have taken part their gradients are complete. What each says of its own:
//
//   weight | whether all gradients are finite | for each replica and slot, whether there is a gradient
void ShardedOnePass::exchange_flags() {
  const auto replicas = static_cast<std::size_t>(parameters_.replicas()), slots = sources_.size();
  const auto own = OnePass::totals();
  std::vector<double> mine{own.weight, own.finite ? 1.0 : 0.0};
  for (std::size_t replica = 0; replica < replicas; ++replica) {
    for (const auto& gradient : of(static_cast<int>(replica)).gradients) mine.push_back(gradient.defined() ? 1 : 0);
  }
  std::vector<double> all(mine.size() * gradients_.size());
  ranks_.group().all_gather(buffer_of(std::span(mine)), buffer_of(std::span(all)), ranks_.deadline());

  totals_ = {};
  for (auto& sources : sources_) sources.clear();
  for (std::size_t rank = 0; rank < gradients_.size(); ++rank) {
    const auto theirs = std::span(all).subspan(rank * mine.size(), mine.size());
    totals_.weight += theirs[0];
    totals_.finite = totals_.finite && theirs[1] > 0;
    const auto has_gradient = theirs.subspan(2);
    for (std::size_t i = 0; i < has_gradient.size(); ++i) {
      if (has_gradient[i] > 0) sources_[i % slots].push_back(&gradients_[rank][i / slots][i % slots]);
    }
  }
}

std::int64_t ShardedOnePass::trainable_end(at::ScalarType dtype) const {
  std::int64_t end = 0;
  for (const auto& slot : parameters_.slots()) {
    if (slot.trainable && slot.dtype == dtype) end = std::max(end, slot.offset + slot.numel);
  }
  return end;
}

void ShardedOnePass::publish(const Group& replicas, Deadline deadline) {
  const int replica = replicas.rank();
  replicas.barrier(deadline);
  // All processes have written all values, and read all gradients, which the next backward overwrites.
  if (replica == 0) ranks_.group().barrier(ranks_.deadline());
  replicas.barrier(deadline);
  if (replica == 0 || replica >= parameters_.copies()) return;
  const at::NoGradGuard no_grad;
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto trainable = [&](int copy) { return parameters_.flat(copy, dtype).narrow(0, 0, trainable_end(dtype)); };
    trainable(replica).copy_(trainable(0));
  }
}

}  // namespace lockstep::gradient
