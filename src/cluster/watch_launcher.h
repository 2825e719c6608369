// Launchers whose death leaves their ranks alive.
#pragma once

namespace lockstep::cluster {

// From now on this process ends soon after the mpirun that started it has: SIGTERM, by which fit saves and ends, and
// SIGKILL ten seconds later. Does nothing where no mpirun is among those that this process descends from, or when it
// was called before. Any thread.
void end_with_launcher();

}  // namespace lockstep::cluster
