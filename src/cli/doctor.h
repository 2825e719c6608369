// `lockstep doctor`: whether a job can run where it is to run, before it does.
#pragma once

#include <iosfwd>

#include "lockstep/cluster/cluster.h"

namespace lockstep::cli {

// As one of the processes of a job that `lockstep run` started: says what this one may use, connects to the others over
// TCP, and rank 0 prints what all have, and what to do about what is wrong. Returns the exit status: 1 where something
// is.
int examine(const Cluster& cluster, std::ostream& out);

}  // namespace lockstep::cli
