// `lockstep doctor`: whether a job can run where it is to run, before it does.
#pragma once

#include <iosfwd>

#include "lockstep/cluster/cluster.h"

namespace lockstep::cli {

// Runs in each process of a job that `lockstep run` started. Finds out what the process may use and connects to the
// others over TCP. Rank 0 prints the findings of all, and what to do about problems. Returns the exit status: 1 where
// there is a problem.
int examine(const Cluster& cluster, std::ostream& out);

}  // namespace lockstep::cli
