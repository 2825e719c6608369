// The algorithms by which ranks that only have messages reduce and distribute; each in a file of its own, with its
// paper.
//
// `data` is the whole buffer, reduced in place; mean is left as the sum, and the caller divides.
#pragma once

#include <vector>

#include "collective/message_passing/team.h"

namespace lockstep::collective {

// Bandwidth: each rank sends and receives (n-1)/n of the buffer. After it slice rank() of `data` is reduced, and the
// others hold partial results.
void ring_reduce_scatter(Team& team, const ElementOp& reduction, std::byte* data, const std::vector<Slice>& slices);

// Slice r comes from rank r.
void ring_all_gather(Team& team, std::size_t element, std::byte* data, const std::vector<Slice>& slices);

// Bandwidth-optimal for powers of two, in 2 log2 n steps; any number of ranks.
void halving_doubling_all_reduce(Team& team, const ElementOp& reduction, std::byte* data, std::size_t count);

// log2 n steps of the whole buffer. After tree_reduce root's data is reduced, and the others' is partial.
void tree_reduce(Team& team, const ElementOp& reduction, std::byte* data, std::size_t count, int root);
void tree_broadcast(Team& team, std::span<std::byte> data, int root);

// One step of n-1 messages of the whole buffer: for a few bytes and few ranks. Sums in the order of ranks.
void direct_all_reduce(Team& team, const ElementOp& reduction, std::byte* data, std::size_t count);

// n-1 steps; partial results stay where they are, in float32 for 16-bit elements. `result`: this rank's reduced slice.
void pairwise_reduce_scatter(Team& team, const ElementOp& reduction, const std::byte* data,
                             const std::vector<Slice>& slices, std::byte* result);

// Everything to rank `root`, which reduces in the order of ranks.
void star_reduce(Team& team, const ElementOp& reduction, std::byte* data, std::size_t count, int root);
void star_broadcast(Team& team, std::span<std::byte> data, int root);

// log2 n steps of empty messages.
void dissemination_barrier(Team& team);

}  // namespace lockstep::collective
