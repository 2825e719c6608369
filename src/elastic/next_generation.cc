#include "elastic/next_generation.h"

#include <algorithm>
#include <chrono>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::elastic {
namespace {

constexpr std::chrono::seconds kToEnter(10);
constexpr std::chrono::milliseconds kBetweenLooks(100);  // looks for members that have gone
constexpr int kMostUnanswered = 50;
const std::string kLost = "lost", kLeft = "left", kOn = "on", kNone = "none", kRefused = "refused: ";

// The entries that decide a generation: "on", "lost" or "left" for each rank of the one before, and the newcomers.
class Entries {
 public:
  Entries(const Members& now, Registry& registry, Deadline deadline)
      : now_(now),
        registry_(registry),
        liveness_(registry.stores()),
        deadline_(deadline),
        prefix_(text("members of generation ", now.world.generation + 1, "/")) {
    for (int r = 0; r < now.world.size; ++r) keys_.push_back(text(prefix_, "rank ", r));
  }

  // Enters a value where there is none; returns the value that is kept.
  std::string enter(int rank, const std::string& value) {
    return registry_.enter(keys_[static_cast<std::size_t>(rank)], value, Deadline::after(kToEnter));
  }
  std::vector<Process> enter_newcomers(const std::vector<Process>& newcomers) {
    const auto lines = newcomers.empty() ? kNone : print(newcomers);
    const auto kept = registry_.enter(prefix_ + "newcomers", lines, Deadline::after(kToEnter));
    return kept == kNone ? std::vector<Process>() : parse_processes(kept);
  }

  // Returns every rank's entry. Enters as lost the ranks without one: those whose processes are lost, and all once the
  // deadline has passed.
  std::vector<std::string> complete() {
    for (int unanswered = 0;;) {
      std::vector<int> missing;
      try {
        return registry_.get(keys_, Deadline::after(kBetweenLooks));
      } catch (const DeadlineExceeded& late) {
        missing = late.ranks();
        // No ranks: the entries have just come, or the store does not answer.
        if (missing.empty() && registry_.passed(deadline_) && ++unanswered > kMostUnanswered) throw;
      }
      std::vector<Process> processes;
      for (const int rank : missing) processes.push_back(now_.processes[static_cast<std::size_t>(rank)]);
      const auto signs = liveness_.look(processes);
      for (std::size_t i = 0; i < missing.size(); ++i) {
        if (cluster::Liveness::is_loss(signs[i]) || registry_.passed(deadline_)) enter(missing[i], kLost);
      }
    }
  }

 private:
  const Members& now_;
  Registry& registry_;
  cluster::Liveness liveness_;
  const Deadline deadline_;
  const std::string prefix_;
  std::vector<std::string> keys_;
};

// Returns the ranks of the next generation. Throws on a member that is in no whole row.
std::vector<int> remaining_ranks(const World& world, int row_size, const std::vector<std::string>& entries) {
  std::vector<int> on;
  for (std::size_t r = 0; r < entries.size(); ++r) {
    if (entries[r] == kOn) on.push_back(static_cast<int>(r));
  }
  auto ranks = whole_rows(on, row_size);
  const bool is_on = std::find(on.begin(), on.end(), world.rank) != on.end();
  if (!is_on || std::find(ranks.begin(), ranks.end(), world.rank) != ranks.end()) return ranks;
  if (ranks.empty()) {
    throw ClusterError(text("regroup: no whole copy of the model, of ", row_size,
                            " ranks, is left; start the job again from its last backup"));
  }
  throw ClusterError(text("regroup: rank ", world.rank, " leaves, since of the ", row_size,
                          " ranks with its copy of the model others are lost; the other copies go on"));
}

}  // namespace

std::string key_of_invitation(const std::string& newcomer) { return "invitation of " + newcomer; }

std::optional<std::vector<int>> lost_in(const std::exception& error, std::int64_t generation) {
  using Ranks = std::vector<int>;
  if (const auto* const peer = dynamic_cast<const PeerLost*>(&error)) {
    return peer->generation() == generation ? Ranks{peer->rank()} : Ranks();
  }
  if (const auto* const late = dynamic_cast<const DeadlineExceeded*>(&error)) {
    return late->ranks().empty() ? std::nullopt : std::optional(late->ranks());
  }
  return dynamic_cast<const Aborted*>(&error) != nullptr ? std::optional(Ranks()) : std::nullopt;
}

std::optional<int> first_lost(const Members& members, cluster::Liveness& liveness) {
  const auto signs = liveness.look(members.processes);
  for (int rank = 0; rank < members.world.size; ++rank) {
    if (rank != members.world.rank && cluster::Liveness::is_loss(signs[static_cast<std::size_t>(rank)])) return rank;
  }
  return std::nullopt;
}

Members next_generation(const Members& now, Registry& registry, const Change& change, Deadline deadline) {
  const auto& world = now.world;
  for (const int rank : change.lost) {
    if (rank < 0 || rank >= world.size) {
      throw InvalidArgument(text("regroup: rank ", rank, " is said to be lost; ranks are 0 to ", world.size - 1));
    }
  }
  Entries entries(now, registry, deadline);
  // Newcomers are entered before this rank is: whoever finds this rank's entry has the newcomers too.
  if (!change.newcomers.empty()) entries.enter_newcomers(change.newcomers);
  const auto enter_lost = [&](bool higher_alone) {
    for (const int rank : change.lost) {
      if (rank > world.rank || (!higher_alone && rank != world.rank)) entries.enter(rank, kLost);
    }
  };
  // This rank enters itself before those that it takes for lost: where a link broke, each end takes the other for lost
  // although both are alive. If it stays broken, the lower rank goes on.
  if (change.insists) enter_lost(true);
  if (entries.enter(world.rank, change.leaves ? kLeft : kOn) == kLost) {
    throw ClusterError(text("regroup: the others took rank ", world.rank, " for lost, and go on without it"));
  }
  enter_lost(false);  // a deadline's error may list this rank too
  Members next{.world = world, .processes = {}, .stores = now.stores};
  for (const int rank : remaining_ranks(world, change.row_size, entries.complete())) {
    if (rank == world.rank) next.world.rank = static_cast<int>(next.processes.size());
    next.processes.push_back(now.processes[static_cast<std::size_t>(rank)]);
  }
  auto newcomers = entries.enter_newcomers({});
  std::erase_if(newcomers, [&](const Process& one) {  // the others of its host do not know yet that it was taken in
    return std::any_of(now.processes.begin(), now.processes.end(),
                       [&](const Process& process) { return process.name == one.name; });
  });
  newcomers = whole_rows(newcomers, change.row_size);
  const auto first_newcomer = next.processes.size();
  for (const auto& newcomer : newcomers) {
    next.processes.push_back(newcomer);
    add_store(next.stores, newcomer.store);
  }
  next.world.generation = world.generation + 1;
  next.world.size = static_cast<int>(next.processes.size());
  const auto placed = [&](std::size_t rank) {
    auto place = next;
    place.world.rank = static_cast<int>(rank);
    place.world.host = next.processes[rank].host;
    const auto is_here = [&](const Process& process) { return process.host == place.world.host; };
    const auto begin = next.processes.begin();
    place.world.local_rank = static_cast<int>(std::count_if(begin, begin + place.world.rank, is_here));
    place.world.local_size = static_cast<int>(std::count_if(begin, next.processes.end(), is_here));
    return place;
  };
  for (std::size_t i = 0; i < newcomers.size(); ++i) {
    const auto key = key_of_invitation(newcomers[i].name);
    const auto place = registry.enter(key, print(placed(first_newcomer + i)), Deadline::after(kToEnter));
    registry.tell(newcomers[i].store, key, place);
  }
  return change.leaves ? next : placed(static_cast<std::size_t>(next.world.rank));
}

Members place_in(const std::string& invitation, const World& self) {
  if (invitation.starts_with(kRefused)) throw ClusterError(invitation.substr(kRefused.size()));
  return parse_members(invitation, self);
}

void refuse(Registry& registry, const Process& newcomer, const std::string& reason) {
  const auto key = key_of_invitation(newcomer.name);
  registry.tell(newcomer.store, key, kRefused + reason);
  registry.tell(registry.here(), key, kRefused + reason);
}

}  // namespace lockstep::elastic
