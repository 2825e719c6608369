// The operations of the simulated NCCL: what each reads and writes, and how a Group carries it out.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/collective/group.h"

namespace simulated_nccl {

// One call of a collective operation, ncclSend or ncclRecv. Addresses are on a device.
struct Operation {
  enum class Kind { all_reduce, broadcast, reduce, all_gather, reduce_scatter, send, recv };

  Kind kind;
  const void* from = nullptr;
  void* to = nullptr;
  std::size_t count = 0;
  int dtype = 0;
  int op = 0;
  int peer = 0;  // the root; for messages the other rank
};

// One rank of a communicator, and its device.
struct Member {
  int rank = 0;
  int size = 1;
  int device = 0;
};

// Says why NCCL would not accept the arguments; empty where it would.
std::string problem_with(const Operation& operation, const Member& member);

// Says which messages of a rank to itself have no counterpart in the same group of calls; empty where all have.
std::string problem_with_own_messages(const std::vector<Operation>& operations, const Member& member);

// Carries out collective operations in their order, then all messages side by side. Throws what the Group throws.
void carry_out(const std::vector<Operation>& operations, const lockstep::Group& group);

}  // namespace simulated_nccl
