// Reduce-scatter by pairwise exchange: Thakur, Rabenseifner and Gropp (2005), section 4.3. In step s every rank sends
// to the rank s above it the slice that the other one reduces. No partial results are sent, so float16 and bfloat16 are
// rounded once.
#include "collective/message_passing/algorithms.h"
#include "kernels/accumulate.h"

namespace lockstep::collective {

void pairwise_reduce_scatter(Team& team, const ElementOp& reduction, const std::byte* data,
                             const std::vector<Slice>& slices, std::byte* result) {
  const int n = team.size(), me = team.rank();
  const auto element = reduction.element();
  const auto slice = [&](int rank) { return slices[static_cast<std::size_t>(rank)]; };
  const auto mine = slice(me);
  const auto outgoing = [&](int rank) -> std::span<const std::byte> {
    return {data + slice(rank).begin * element, slice(rank).count() * element};
  };
  if (!kernels::is_half(reduction.dtype)) {
    copy_bytes(result, data + mine.begin * element, mine.count() * element);
    for (int step = 1; step < n; ++step) {
      const int to = (me + step) % n, from = (me + n - step) % n;
      team.swap_and_fold(to, outgoing(to), from, reduction, result, mine.count());
    }
    return;
  }
  auto* const sum = reinterpret_cast<float*>(team.scratch().take(mine.count() * sizeof(float)));
  kernels::widen(reduction.dtype, sum, data + mine.begin * element, mine.count());
  const transport::Consumer fold = [&](std::size_t at, const std::byte* arrived, std::size_t bytes) {
    kernels::accumulate_wide(reduction.op, reduction.dtype, sum + at / element, arrived, bytes / element);
  };
  for (int step = 1; step < n; ++step) {
    const int to = (me + step) % n, from = (me + n - step) % n;
    team.exchange({{to, outgoing(to).data(), outgoing(to).size(), {}}},
                  {{from, nullptr, mine.count() * element, &fold, {}}});
  }
  if (reduction.op == ReduceOp::mean) kernels::divide(DType::float32, sum, static_cast<std::size_t>(n), mine.count());
  kernels::narrow(reduction.dtype, result, sum, mine.count());
}

}  // namespace lockstep::collective
