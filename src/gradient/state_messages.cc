#include "gradient/state_messages.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "lockstep/base/error.h"
#include "ops/dtypes.h"

namespace lockstep::gradient {

at::Tensor state_in(const Updater::States& states, const Shard& part, std::size_t index) {
  for (const auto* const one : {&states.own, &states.copies}) {
    const auto owned = one->owned(part.slot);
    if (part.begin < owned.begin || part.begin + part.count > owned.begin + owned.count) continue;
    return one->state(part.slot, index).narrow(0, part.begin - owned.begin, part.count);
  }
  throw Error("elements of the optimizer's state that this process does not have");
}

void Messages::send(const at::Tensor& elements, int to) { calls_.push_back(Call::send(buffer_of(elements.cpu()), to)); }

void Messages::receive(const at::Tensor& elements, int from) {
  const auto received = elements.is_cpu() ? elements : at::empty_like(elements, at::TensorOptions(at::kCPU));
  if (!elements.is_cpu()) copies_.emplace_back(elements, received);
  calls_.push_back(Call::recv(buffer_of(received), from));
}

void Messages::exchange(const Communicator& ranks) {
  const at::NoGradGuard no_grad;
  if (!calls_.empty()) ranks.group().run(calls_, ranks.deadline());
  for (const auto& [to, from] : copies_) to.copy_(from);
}

Buffer Messages::buffer_of(const at::Tensor& tensor) {
  kept_.push_back(tensor);
  return {tensor.data_ptr(), static_cast<std::size_t>(tensor.numel()), ops::dtype_of(tensor.scalar_type())};
}

std::vector<at::Tensor> copies_of_state(const Communicator& ranks, const GradientSync& sync, const Updater& updater,
                                        std::size_t index, const std::vector<std::vector<Shard>>& needed) {
  const at::NoGradGuard no_grad;
  const auto& states = updater.states();
  auto held = sync.held();
  if (held.empty()) held.push_back(sync.shards().owned());  // of a process alone
  const auto me = ranks.rank();
  std::vector<at::Tensor> copies;
  Messages messages;
  // The moves to a rank come in the order of what it needs, so each shard is a number of them.
  std::size_t shard = 0;
  std::int64_t left = 0;
  for (const auto& move : moves_between(held, needed).moves) {
    if (move.to != me) {
      if (move.from == me) messages.send(state_in(states, move.part, index), move.to);
      continue;
    }
    if (left == 0) {
      const auto& whole = needed[static_cast<std::size_t>(me)][shard++];
      const auto dtype = states.own.dtype(whole.slot);
      copies.push_back(at::empty({whole.count}, at::TensorOptions(dtype)));
      left = whole.count;
    }
    const auto into = copies.back().narrow(0, copies.back().numel() - left, move.part.count);
    left -= move.part.count;
    if (move.from == me) {
      into.copy_(state_in(states, move.part, index));
    } else {
      messages.receive(into, move.from);
    }
  }
  messages.exchange(ranks);
  return copies;
}

}  // namespace lockstep::gradient
