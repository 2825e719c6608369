// Messages between processes of which each has parts of the optimizer's state.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "gradient/gradient_sync.h"
#include "gradient/shard_moves.h"
#include "gradient/updater.h"
#include "lockstep/collective/communicator.h"

namespace lockstep::gradient {

// Elements of state `index`, flat: a view of the stored values, in the one of the two that has them. Throws Error where
// this process does not.
at::Tensor state_in(const Updater::States& states, const Shard& part, std::size_t index);

// Messages that are exchanged at once; elements that are not in the host's memory are copied there.
class Messages {
 public:
  void send(const at::Tensor& elements, int to);
  void receive(const at::Tensor& elements, int from);
  void exchange(const Communicator& ranks);  // collective

 private:
  Buffer buffer_of(const at::Tensor& tensor);

  std::vector<Call> calls_;
  std::vector<at::Tensor> kept_;                           // while they are sent
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // of what was received: to, from
};

// State `index` of the elements in `needed[rank]`, of this process's rank: a flat copy of each, in host memory.
// Collective, between steps.
std::vector<at::Tensor> copies_of_state(const Communicator& ranks, const GradientSync& sync, const Updater& updater,
                                        std::size_t index, const std::vector<std::vector<Shard>>& needed);

}  // namespace lockstep::gradient
