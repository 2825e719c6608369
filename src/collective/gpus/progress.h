// How far each rank of a Group has come with its calls on GPUs, so that ranks can name who is late.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "collective/gpus/watch.h"
#include "transport/shown_numbers.h"

namespace lockstep::collective::gpus {

// One rank's end. Any thread.
class Progress {
 public:
  // `shown` may be null: then nobody knows who is late.
  Progress(transport::ShownNumbers* shown, int rank, int size) : shown_(shown), rank_(rank), size_(size) {}

  // Shows the others how many calls this rank has made, and whether it waits for one. Both are read in the order of the
  // calls of `show`.
  void show(const std::function<std::int64_t()>& calls, const std::function<bool()>& waits);

  // Tells those who have asked. One thread at a time, as GroupBackend::run.
  void answer() const;

  // Asks who has not made the call, and returns the ranks that say so, or do not answer. Of the ranks that messages
  // need, those that wait for nobody are returned; where all of them wait, the others that do not. `looks` is called
  // meanwhile; where it returns false, the Group has failed, and nothing is returned.
  std::optional<std::vector<int>> ranks_without(const WatchedCall& call, const std::function<bool()>& looks) const;

 private:
  std::vector<int> late_ranks(const WatchedCall& call, const transport::ShownNumbers::Told& told) const;

  transport::ShownNumbers* const shown_;
  const int rank_;
  const int size_;
  Mutex showing_;
};

}  // namespace lockstep::collective::gpus
