#include "elastic/next_generation.h"

#include <algorithm>
#include <chrono>
#include <sstream>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::elastic {
namespace {

constexpr std::chrono::seconds kToRead(5);
constexpr std::chrono::milliseconds kBetweenLooks(100);  // for those that have gone
constexpr int kMostUnanswered = 50;
const std::string kLost = "lost", kLeft = "left", kOn = "on ", kNone = "none", kRefused = "refused: ";

std::string key_of_invitation(const std::string& newcomer) { return "invitation of " + newcomer; }

// One a line: the name, and the host.
std::string print(const std::vector<Newcomer>& newcomers) {
  std::string lines;
  for (const auto& newcomer : newcomers) lines += text(newcomer.name, " ", newcomer.host, "\n");
  return lines.empty() ? kNone : lines;
}

std::vector<Newcomer> parse(const std::string& printed) {
  std::vector<Newcomer> newcomers;
  std::istringstream lines(printed == kNone ? "" : printed);
  for (Newcomer next; lines >> next.name && std::getline(lines >> std::ws, next.host);) newcomers.push_back(next);
  return newcomers;
}

// The entries of a generation: of each rank of the one before its host, or that it is lost or has left; and newcomers.
class Entries {
 public:
  Entries(const Members& now, Registry& registry, Deadline deadline)
      : now_(now),
        registry_(registry),
        deadline_(deadline),
        prefix_(text("members of generation ", now.world.generation + 1, "/")) {
    for (int r = 0; r < now.world.size; ++r) keys_.push_back(text(prefix_, "rank ", r));
  }

  // Where there is none; returns the one that is kept.
  std::string enter(int rank, const std::string& value) {
    return registry_.enter(keys_[static_cast<std::size_t>(rank)], value, Deadline::after(kToRead));
  }
  std::vector<Newcomer> enter_newcomers(const std::vector<Newcomer>& newcomers) {
    return parse(registry_.enter(prefix_ + "newcomers", print(newcomers), Deadline::after(kToRead)));
  }

  // Every rank's. Ranks without one that have gone, or that have none at the deadline, are entered as lost.
  std::vector<std::string> complete() {
    for (int unanswered = 0;;) {
      std::vector<int> missing;
      try {
        return registry_.get(keys_, Deadline::after(kBetweenLooks));
      } catch (const DeadlineExceeded& late) {
        missing = late.ranks();
        // None: they have just come, or the store does not answer.
        if (missing.empty() && registry_.passed(deadline_) && ++unanswered > kMostUnanswered) throw;
      }
      for (const int rank : missing) {
        const auto& name = now_.names[static_cast<std::size_t>(rank)];
        const bool is_lost = registry_.passed(deadline_) || has_gone(name, registry_, Deadline::after(kToRead));
        if (is_lost) enter(rank, kLost);
      }
    }
  }

 private:
  const Members& now_;
  Registry& registry_;
  const Deadline deadline_;
  const std::string prefix_;
  std::vector<std::string> keys_;
};

// The world, and names one a line.
std::string print(const Members& members) {
  const auto& world = members.world;
  return text(world.generation, " ", world.size, " ", world.rank, " ", world.local_size, " ", world.local_rank, "\n",
              join(members.names, "\n"), "\n");
}

}  // namespace

std::string key_of_end(const std::string& name) { return "end of " + name; }

std::shared_ptr<void> show_presence(const Store& store, const std::string& name) {
  return store.set_at_end(key_of_end(name), "reached", Deadline::after(kToRead));
}

bool has_gone(const std::string& name, Registry& registry, Deadline deadline) {
  return !registry.enter(key_of_end(name), "", deadline).empty();
}

std::string name_of_process(int rank) { return text("process ", rank); }

Members first_members(const World& world) {
  Members members{.world = world, .names = {}};
  for (int r = 0; r < world.size; ++r) members.names.push_back(name_of_process(r));
  return members;
}

std::optional<int> first_gone(const Members& members, Registry& registry, Deadline deadline) {
  for (int r = 0; r < members.world.size; ++r) {
    const auto& name = members.names[static_cast<std::size_t>(r)];
    if (r != members.world.rank && has_gone(name, registry, deadline)) return r;
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
  // Before this rank's own entry: whoever finds that has these too.
  if (!change.newcomers.empty()) entries.enter_newcomers(change.newcomers);
  // This rank enters itself before those that it takes for lost: where a link broke, each end takes the other for lost
  // although both are alive.
  if (entries.enter(world.rank, change.leaves ? kLeft : kOn + world.host) == kLost) {
    throw ClusterError(text("regroup: the others took rank ", world.rank, " for lost, and go on without it"));
  }
  for (const int rank : change.lost) {
    if (rank != world.rank) entries.enter(rank, kLost);  // a deadline's error may list this rank too
  }
  Members next;
  next.world = world;
  std::vector<std::string> hosts;  // [rank]
  const auto members = entries.complete();
  for (std::size_t r = 0; r < members.size(); ++r) {
    if (static_cast<int>(r) == world.rank) next.world.rank = static_cast<int>(hosts.size());
    if (members[r] == kLost || members[r] == kLeft) continue;
    hosts.push_back(members[r].substr(kOn.size()));
    next.names.push_back(now.names[r]);
  }
  const auto newcomers = entries.enter_newcomers({});
  const auto first_newcomer = hosts.size();
  for (const auto& newcomer : newcomers) {
    hosts.push_back(newcomer.host);
    next.names.push_back(newcomer.name);
  }
  next.world.generation = world.generation + 1;
  next.world.size = static_cast<int>(hosts.size());
  const auto placed = [&](std::size_t rank) {
    auto place = next;
    place.world.rank = static_cast<int>(rank);
    place.world.host = hosts[rank];
    place.world.local_rank = static_cast<int>(std::count(hosts.begin(), hosts.begin() + place.world.rank, hosts[rank]));
    place.world.local_size = static_cast<int>(std::count(hosts.begin(), hosts.end(), hosts[rank]));
    return place;
  };
  for (std::size_t i = 0; i < newcomers.size(); ++i) {
    registry.enter(key_of_invitation(newcomers[i].name), print(placed(first_newcomer + i)), Deadline::after(kToRead));
  }
  return change.leaves ? next : placed(static_cast<std::size_t>(next.world.rank));
}

Members invitation(const World& self, Registry& registry, const std::string& newcomer, Deadline deadline) {
  const auto told = registry.get({key_of_invitation(newcomer)}, deadline)[0];
  if (told.starts_with(kRefused)) throw ClusterError(told.substr(kRefused.size()));
  Members members{.world = self, .names = {}};
  auto& world = members.world;
  std::istringstream lines(told);
  lines >> world.generation >> world.size >> world.rank >> world.local_size >> world.local_rank >> std::ws;
  for (std::string name; std::getline(lines, name);) members.names.push_back(name);
  return members;
}

bool was_invited(Registry& registry, const std::string& newcomer, Deadline deadline) {
  return !registry.enter(key_of_invitation(newcomer), "", deadline).empty();
}

void refuse(Registry& registry, const std::string& newcomer, const std::string& reason, Deadline deadline) {
  registry.enter(key_of_invitation(newcomer), kRefused + reason, deadline);
}

}  // namespace lockstep::elastic
