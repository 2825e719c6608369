#include "gradient/mapped.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <string>

namespace lockstep::gradient {
namespace {

Ownership sharded_evenly(const ReplicatedParameters& parameters, const Communicator& ranks) {
  return {ranks, ShardMap::even(parameters.trainable(), ranks.size()).shares(), parameters.replicas(),
          Ownership::Writes::first_copies};
}

}  // namespace

std::unique_ptr<Mapped> Mapped::make(ReplicatedParameters& parameters, const Communicator& ranks) {
  parameters.compare_models(ranks);
  ranks.check_all_agree("numbers of replicas", std::to_string(parameters.replicas()));
  const auto bytes = parameters.flat_bytes() * static_cast<std::size_t>(parameters.replicas());
  if (bytes == 0 || !parameters.move_first_copy(ranks)) return nullptr;
  const auto memories = ranks.group().allocate_shared(bytes, ranks.deadline());
  if (memories.empty()) return nullptr;
  return std::unique_ptr<Mapped>(new Mapped(parameters, ranks, memories));
}

Mapped::Mapped(const ReplicatedParameters& parameters, Communicator ranks, const std::vector<Memory>& memories)
    : Reduction(sharded_evenly(parameters, ranks), /*during_backward=*/true),
      parameters_(parameters),
      ranks_(std::move(ranks)),
      own_(parameters) {
  for (const auto& memory : memories) {
    for (int replica = 0; replica < parameters.replicas(); ++replica) {
      auto& gradients = gradients_.emplace_back();
      for (const auto& slot : parameters.slots()) {
        const auto index = static_cast<std::size_t>(replica);
        gradients.push_back(slot.trainable
                                ? parameters.flat_in(memory, index, slot.dtype).narrow(0, slot.offset, slot.numel)
                                : at::Tensor());
      }
    }
  }
  added_.assign(gradients_.size(), std::vector<at::Tensor>(parameters.slots().size()));
  parts_.assign(added_.begin(), added_.end());
}

const at::Tensor& Mapped::own_gradient(int replica, std::size_t slot) const {
  return gradients_[static_cast<std::size_t>(ranks_.rank() * parameters_.replicas() + replica)][slot];
}

at::Tensor Mapped::memory_for(int replica, std::size_t slot) const {
  const auto& gradient = own_gradient(replica, slot);
  return gradient.defined() ? in_shape_of(parameters_.parameter(replica, slot), gradient) : at::Tensor();
}

void Mapped::add(int replica, std::size_t slot, const at::Tensor& gradient) {
  own_.add(replica, slot, placed_in(own_gradient(replica, slot), gradient));
}

Sums Mapped::finish(const Group& replicas, double weight, bool check_finite, Deadline deadline) {
  const auto own = own_.finish(replicas, weight, check_finite, deadline);
  if (replicas.rank() == 0) exchange_flags(own);
  replicas.barrier(deadline);
  return sums_;
}

// Once all processes have taken part, all gradients are complete. Each process says of its own gradients:
//
//   weight | whether all gradients are finite | for each replica and slot, whether there is a gradient
void Mapped::exchange_flags(const Sums& own) {
  std::vector<double> mine{own.weight, own.finite ? 1.0 : 0.0};
  for (const auto& of_replica : own.parts) {
    for (const auto& gradient : of_replica) mine.push_back(gradient.defined() ? 1 : 0);
  }
  const auto ranks = static_cast<std::size_t>(ranks_.size()), replicas = own.parts.size();
  std::vector<double> all(mine.size() * ranks);
  ranks_.group().all_gather(buffer_of(std::span(mine)), buffer_of(std::span(all)), ranks_.deadline());

  sums_ = {.parts = parts_};
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const auto theirs = std::span(all).subspan(rank * mine.size(), mine.size());
    sums_.weight += theirs[0];
    sums_.finite = sums_.finite && theirs[1] > 0;
    auto has_gradient = theirs.begin() + 2;
    for (std::size_t one = rank * replicas; one < (rank + 1) * replicas; ++one) {
      for (std::size_t slot = 0; slot < added_[one].size(); ++slot)
        added_[one][slot] = *has_gradient++ > 0 ? gradients_[one][slot] : at::Tensor();
    }
  }
}

std::int64_t Mapped::trainable_end(at::ScalarType dtype) const {
  std::int64_t end = 0;
  for (const auto& slot : parameters_.slots()) {
    if (slot.trainable && slot.dtype == dtype) end = std::max(end, slot.offset + slot.numel);
  }
  return end;
}

void Mapped::publish(const Group& replicas, Deadline deadline) {
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
