// Launchers whose death leaves their ranks alive.
#pragma once

namespace lockstep::cluster {

// From now on this process ends soon after the mpirun that started it: SIGTERM, by which fit saves and ends, then
// SIGKILL ten seconds later. Does nothing where this process has no mpirun among its ancestors, or in a second call.
// Any thread.
void end_with_launcher();

}  // namespace lockstep::cluster
