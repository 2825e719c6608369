// A Group of many ranks of which one is there: for what a rank of a larger job computes, and what it would communicate.
#pragma once

#include <memory>
#include <vector>

#include "collective/backend.h"
#include "lockstep/collective/communicator.h"

namespace lockstep::parallel {

// One rank's handle. The other ranks give what this one does, but for sums, which are its own alone: values differ from
// those of a real Group, shapes do not. Nothing waits. One thread.
class Rehearsal {
 public:
  struct Counted {
    Call::Kind kind;
    double bytes;  // of the larger of input and output
  };

  explicit Rehearsal(int ranks, int rank = 0);

  // True where the ranks are those of a Rehearsal.
  static bool runs_on(const Communicator& ranks);

  const Communicator& ranks() const { return ranks_; }

  // Returns the calls since the last `take`.
  std::vector<Counted> take();

 private:
  class Backend;
  const std::shared_ptr<Backend> backend_;
  const Communicator ranks_;
};

}  // namespace lockstep::parallel
