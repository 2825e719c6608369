// `lockstep bench collectives`: how long operations of a Group take, with a check of their results.
#pragma once

#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/collective/make_group.h"

namespace lockstep::cli {

struct BenchOptions {
  std::string operation = "all_reduce";
  std::string dtype = "float32";
  GroupOptions group;
  int ranks = 2;
  std::vector<std::size_t> sizes;    // bytes; empty: from 4 bytes to 64 MiB
  bool any_buffer = false;           // memory of malloc instead of the group's `allocate`
  double seconds = 0.5;              // about how long each size is measured
  std::vector<std::string> command;  // how to start this program again, without options
  std::string ranks_per_host;        // "2": ranks 0 and 1 are one host, and so on; empty: all on one

  // Set in a process that is one rank of a run that is already going on.
  std::optional<World> world;
  std::string store;
  bool hold_store = false;
};

// Starts the ranks: as threads for the backend "threads", else as processes of this host. Prints rank 0's table, with a
// line of JSON at its end. Algorithm bandwidth and bus bandwidth are those of nccl-tests (doc/PERFORMANCE.md there).
// Returns the exit status: 1 where a result was wrong or a rank failed. Throws InvalidArgument.
int bench_collectives(BenchOptions options, std::ostream& out);

}  // namespace lockstep::cli
