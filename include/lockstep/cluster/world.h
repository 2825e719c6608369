// World: which process this is among those of a job. Torch-free.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

struct World {
  int rank = 0;
  int size = 1;

  // This rank's number among the ranks that share this host's cores and GPUs, and their count.
  int local_rank = 0;
  int local_size = 1;

  // Ranks with one host name share memory. The name is given, not detected: containers of one machine may share none.
  std::string host = "localhost";

  // This rank listens there for ranks of other hosts: a numeric address of this machine.
  std::string address = "127.0.0.1";

  // Counts the memberships of a job: after a loss the survivors go on as a World of the next generation.
  std::int64_t generation = 0;
};

}  // namespace lockstep
