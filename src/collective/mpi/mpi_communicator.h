// A communicator of the members of a Group.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cluster/bootstrap.h"
#include "collective/mpi/library.h"
#include "lockstep/base/deadline.h"

namespace lockstep::collective::mpi {

// Says why this process cannot use MPI; empty where it can. Does not initialise MPI.
std::string problem();

class MpiCommunicator {
 public:
  // Collective among the members. Initialises MPI where that has not been done. `check` is called while it waits, and
  // throws where a member is lost. Throws InvalidArgument on all members where one of them cannot use MPI, or where two
  // are one MPI rank, as threads of a process are.
  MpiCommunicator(cluster::Bootstrap& members, const std::function<void()>& check, Deadline deadline);

  // Frees the communicator, unless a call has failed in it.
  ~MpiCommunicator();
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;

  Handle handle() const { return handle_; }
  void mark_failed();

 private:
  Handle handle_ = 0;
  bool failed_ = false;
};

}  // namespace lockstep::collective::mpi
