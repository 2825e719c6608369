// The times at which gradients become updates.
#pragma once

namespace lockstep::parameter_server {

// Asynchronous unless set: each step is computed by one worker, and workers do not wait for each other.
struct UpdateMode {
  // Above 1, workers compute a step together, each a part of its batch; the next step begins when the step is applied
  // (synchronous). The first `needed` of the parts to come make the update. With fewer than `parts`, there are spare
  // workers (Chen et al., "Revisiting distributed synchronous SGD", 2016).
  int parts = 1;
  int needed = 1;

  // Steps that a worker may have finished more than another before it waits; -1: any number. Ho et al., "More effective
  // distributed ML via a stale synchronous parallel parameter server", NIPS 2013.
  int most_ahead = -1;
};

// Throws InvalidArgument for parts below 1, and parts that are needed and cannot come.
void check(const UpdateMode& mode);

}  // namespace lockstep::parameter_server
