// MPI in this process: when it begins and ends.
#pragma once

#include <functional>

#include "lockstep/base/deadline.h"

namespace lockstep::collective::mpi {

// Initialises MPI, for calls from any thread, unless that has been done. Returns this process's rank in MPI_COMM_WORLD.
// All processes of the launcher make the first call, and wait for each other. `check` is called meanwhile, and throws
// where the others do not come. Where we initialise MPI, the end of the process finalises it. Throws InvalidArgument
// where MPI has been finalised or gives threads too little, and DeadlineExceeded. Any thread.
int start(const std::function<void()>& check, Deadline deadline);

bool has_ended();  // true once MPI is finalised

// Some call has failed: MPI's ranks may be out of step, so the end of the process does not wait long for the others.
void mark_failed();

// Runs `act`, which waits for other ranks without a deadline, in a thread of its own. That thread is left alone where
// `check` throws or the deadline passes. So `act` owns what it uses. Throws what `act` does.
void run_bounded(const char* operation, std::function<void()> act, const std::function<void()>& check,
                 Deadline deadline);

}  // namespace lockstep::collective::mpi
