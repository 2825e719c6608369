// A Call as calls of MPI.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "collective/calls.h"
#include "collective/mpi/library.h"
#include "collective/mpi/operation.h"

namespace lockstep::collective::mpi {

// A communicator, and where this rank is in it.
struct Ranks {
  Handle comm = 0;
  int rank = 0, size = 0;
};

// Calls go in rounds, which bound the copies of buffers and keep counts below MPI's 2^31. A round has elements [begin,
// begin + count) of each rank's share, or of the buffer where ranks have no shares.
struct Window {
  std::size_t begin = 0, count = 0;
};

// The elements of the longest share, or of the buffer. Of an all_to_all with counts this rank knows its own alone.
std::size_t longest_share(const Call& call, int size);

// Short rounds of reductions keep slices in the caches: 64 MiB take a third of the time of a single round.
std::size_t bytes_per_round(Call::Kind kind, int size);

// The window of the round from `begin` on, for a longest share of `longest`.
Window window_from(std::size_t begin, std::size_t longest, const Call& call, int size);

// The parts of the ranks' shares that are in the window, as slices of the buffer that has all shares. `each`: of every
// rank where there are no counts.
std::vector<Slice> slices_in(const Window& window, const Counts& counts, std::size_t each, int size);

// Starts the part of a collective call that is in the window. mean adds. Not for reductions of 16-bit floats, which MPI
// does not know.
void start_round(Operation& operation, const Call& call, const Window& window, const Ranks& ranks);

// The buffers that go to a rank and come from it; empty: no message.
struct Swap {
  ConstBuffer sent;
  Buffer received;
};

// Starts messages with all ranks, [rank]; this rank's own is empty.
void start_swaps(Operation& operation, const std::vector<Swap>& swaps, const Ranks& ranks);

// Starts sends and receives side by side.
void start_messages(Operation& operation, std::span<const Call> calls, const Ranks& ranks);

}  // namespace lockstep::collective::mpi
