// The optimizer's state, and the values, of an elastic job, in which processes are lost, leave and come.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gradient/ownership.h"
#include "gradient/replicated_parameters.h"
#include "gradient/updater.h"
#include "lockstep/collective/communicator.h"

namespace lockstep::gradient {

// Each membership divides the state in its own way: a version of it. A process gives a version up when all have the
// next one. Where a process is lost before that, some may have both versions, and all go on from the newest that each
// of them has. A process that came with the next version alone begins anew.
//
// One thread, between steps.
class MovingState {
 public:
  // `ownership`: the first one. `has_state`: false in a newcomer, which gets it from the others. `trains_apart`: each
  // process has a state and values of its own, so a newcomer gets all of them from one process.
  MovingState(std::shared_ptr<ReplicatedParameters> parameters, Communicator ranks, const Ownership& ownership,
              bool has_state, bool trains_apart = false);

  // Brings each process the state and the values that it needs now, from all that have them in parallel. Called when
  // the updater's ownership has changed and all that have the state have made the same updates. Collective.
  //
  // Throws StateLost on all where some elements' state was in lost processes alone, and again until a whole state is
  // loaded. All then have the rule's initial state, which is right where there was no update yet. Throws ClusterError
  // where all that had the state are lost. Throws what the Group throws; then `move` is called for the next Group.
  void move(Updater& updater);

  // Called on all when a whole state was loaded.
  void tell_restored() { is_lost_ = false; }

 private:
  struct Place {
    std::int64_t version = 0;
    int rank = 0;  // of this process in that membership
    ShardsOfRanks held;
  };
  using Versions = std::map<std::int64_t, int>;  // of one process: its rank in each

  void copy_whole_state(Updater& updater, const std::vector<Versions>& all);
  void divide_anew(Updater& updater, const std::vector<Versions>& all);
  void lose_state(Updater& updater, const std::vector<Versions>& all, const std::string& what);
  std::string names_of(const std::vector<Shard>& lost) const;
  std::vector<Versions> gather_versions() const;
  void go_back_to(std::int64_t version, Updater& updater);
  ShardsOfRanks held_now(std::int64_t version, const std::vector<Versions>& all) const;
  void transfer(const std::vector<ShardMove>& moves, const Updater::States& from, const Updater::States& to) const;

  const std::shared_ptr<ReplicatedParameters> parameters_;
  const Communicator ranks_;
  const bool trains_apart_;
  bool is_lost_ = false;                                     // what it had; it has loaded nothing since
  std::optional<Place> place_;                               // of the updater's states; none: it has nothing
  std::optional<std::pair<Place, Updater::States>> before_;  // which not all are known to have given up
};

// State `index` of the elements in `needed[rank]`, of this process's rank: a flat copy of each, in host memory.
// Collective, between steps.
std::vector<at::Tensor> copies_of_state(const Communicator& ranks, const Updater& updater, std::size_t index,
                                        const ShardsOfRanks& needed);

}  // namespace lockstep::gradient
