#include "cluster/next_generation.h"

#include <chrono>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::cluster {
namespace {

constexpr std::chrono::seconds kToRead(5);
const std::string kLost = "lost", kOn = "on ";

// A rank's entry in the store is its host, or that it is lost. The first value written is kept, so that all ranks find
// the same members, whenever they read.
class Register {
 public:
  Register(const World& world, const Store& store, Deadline deadline)
      : store_(store.prefixed(text("members of generation ", world.generation + 1, "/"))), deadline_(deadline) {
    for (int r = 0; r < world.size; ++r) keys_.push_back(text("rank ", r));
  }

  // Sets the entry where there is none; returns the entry that is kept.
  std::string enter(int rank, const std::string& value, Deadline deadline) const {
    return store_.compare_set(keys_[static_cast<std::size_t>(rank)], "", value, deadline);
  }

  // Every rank's entry. Ranks without one at the deadline are entered as lost.
  std::vector<std::string> complete() const {
    try {
      return store_.get(keys_, deadline_);
    } catch (const DeadlineExceeded& late) {
      const auto soon = Deadline::after(kToRead);
      for (const int rank : late.ranks()) enter(rank, kLost, soon);
      return store_.get(keys_, soon);
    }
  }

 private:
  const Store store_;
  const Deadline deadline_;
  std::vector<std::string> keys_;
};

}  // namespace

World next_generation(const World& world, const Store& store, const std::vector<int>& lost, Deadline deadline) {
  for (const int rank : lost) {
    if (rank < 0 || rank >= world.size) {
      throw InvalidArgument(text("regroup: rank ", rank, " is said to be lost; ranks are 0 to ", world.size - 1));
    }
  }
  const Register members(world, store, deadline);
  // This rank enters itself first: where a link broke, each end takes the other for lost although both are alive.
  if (members.enter(world.rank, kOn + world.host, deadline) == kLost) {
    throw ClusterError(text("regroup: the others took rank ", world.rank, " for lost, and go on without it"));
  }
  for (const int rank : lost) {
    if (rank != world.rank) members.enter(rank, kLost, deadline);  // a deadline's error may list this rank too
  }
  World next = world;
  next.generation = world.generation + 1;
  next.size = next.local_size = 0;
  const auto entries = members.complete();
  for (int r = 0; r < world.size; ++r) {
    const auto& entry = entries[static_cast<std::size_t>(r)];
    if (entry == kLost) continue;
    const bool shares_host = entry == kOn + world.host;
    if (r == world.rank) {
      next.rank = next.size;
      next.local_rank = next.local_size;
    }
    next.size += 1;
    next.local_size += shares_host ? 1 : 0;
  }
  return next;
}

}  // namespace lockstep::cluster
