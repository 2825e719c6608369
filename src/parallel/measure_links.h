// How long ranks take to send and to reduce.
#pragma once

#include <chrono>
#include <functional>
#include <map>

#include "lockstep/collective/communicator.h"
#include "parallel/choose_split.h"

namespace lockstep::parallel {

// How long `act` takes.
template <class Act>
double seconds_of(const Act& act) {
  const auto start = Deadline::Clock::now();
  act();
  return std::chrono::duration<double>(Deadline::Clock::now() - start).count();
}

// The ranks that measure, of a DeviceMesh: an error in one of the Groups ends the calls in all. Every call is
// collective over them.
class MeasuredLinks {
 public:
  explicit MeasuredLinks(Communicator all) : all_(std::move(all)) {}

  const Communicator& all() const { return all_; }

  // True where there are Groups of so many neighbouring ranks.
  bool has(int ranks) const { return all_.size() % ranks == 0; }

  // This rank's Group of `count` ranks, `stride` apart; of fewer where ranks are left over. Made when it is first asked
  // for.
  const Communicator& group(int count, int stride);

  // average_gradients over a data axis of so many ranks, and a message between stages of meshes with such a tensor
  // axis.
  LinkTimes average(int ranks);
  LinkTimes message(int tensor);

  // One operation of a Group of all ranks, measured when it is first asked for.
  const LinkTimes& collective(Call::Kind kind);

 private:
  // `prepare` makes what is sent, for rising sizes, and returns what is timed. The median of some runs, the mean over
  // ranks.
  using Prepare = std::function<std::function<void()>(double bytes)>;
  LinkTimes measure(int ranks, const Prepare& prepare) const;

  const Communicator all_;
  std::map<std::pair<int, int>, Communicator> groups_;  // by count and stride
  std::map<Call::Kind, LinkTimes> collectives_;
};

}  // namespace lockstep::parallel
