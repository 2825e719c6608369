// Direct: every rank sends its buffer to every other rank and reduces by itself: one step, n-1 times the bytes. Star:
// one rank reduces for all (tf.distribute.ReductionToOneDevice).
#include "collective/message_passing/algorithms.h"
#include "kernels/reduce.h"

namespace lockstep::collective {
namespace {

// Receives every rank's buffer and leaves the reduction in `data`. kernels::reduce already divides where the op is
// mean.
void gather_and_reduce(Team& team, const ElementOp& reduction, std::byte* data, std::size_t count, bool sends) {
  const auto bytes = count * reduction.element();
  const auto place = (bytes + 63) / 64 * 64;
  const auto n = static_cast<std::size_t>(team.size());
  auto* const others = team.scratch().take(place * n);
  std::vector<transport::Outgoing> outgoing;
  std::vector<transport::Incoming> incoming;
  std::vector<const void*> inputs;
  for (int r = 0; r < team.size(); ++r) {
    auto* const theirs = others + place * static_cast<std::size_t>(r);
    inputs.push_back(r == team.rank() ? data : theirs);
    if (r == team.rank()) continue;
    if (sends) outgoing.push_back({r, data, bytes, {}});
    incoming.push_back({r, theirs, bytes, nullptr, {}});
  }
  team.exchange(std::move(outgoing), std::move(incoming));
  void* const outputs[] = {data};
  kernels::reduce(reduction.op, reduction.dtype, inputs, outputs, count);
}

}  // namespace

void direct_all_reduce(Team& team, const ElementOp& reduction, std::byte* data, std::size_t count) {
  gather_and_reduce(team, reduction, data, count, true);
}

void star_reduce(Team& team, const ElementOp& reduction, std::byte* data, std::size_t count, int root) {
  if (team.rank() == root) return gather_and_reduce(team, reduction, data, count, false);
  team.send(root, {data, count * reduction.element()});
}

void star_broadcast(Team& team, std::span<std::byte> data, int root) {
  if (team.rank() != root) return team.receive(root, data);
  std::vector<transport::Outgoing> outgoing;
  for (int r = 0; r < team.size(); ++r) {
    if (r != root) outgoing.push_back({r, data.data(), data.size(), {}});
  }
  team.exchange(std::move(outgoing), {});
}

}  // namespace lockstep::collective
