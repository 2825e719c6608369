#include "elastic/next_generation.h"

#include <chrono>
#include <sstream>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::elastic {
namespace {

constexpr std::chrono::seconds kToRead(5);
const std::string kLost = "lost", kLeft = "left", kOn = "on ", kNone = "none", kRefused = "refused: ";

std::string key_of_invitation(std::int64_t newcomer) { return text("invitation of newcomer ", newcomer); }

// One a line: the number, and the host.
std::string print(const std::vector<Newcomer>& newcomers) {
  std::string lines;
  for (const auto& newcomer : newcomers) lines += text(newcomer.number, " ", newcomer.host, "\n");
  return lines.empty() ? kNone : lines;
}

std::vector<Newcomer> parse(const std::string& printed) {
  std::vector<Newcomer> newcomers;
  std::istringstream lines(printed == kNone ? "" : printed);
  for (Newcomer next; lines >> next.number && std::getline(lines >> std::ws, next.host);) newcomers.push_back(next);
  return newcomers;
}

// The entries of a generation: of each rank of the one before its host, or that it is lost or has left; and newcomers.
class Entries {
 public:
  Entries(const World& world, Registry& registry, Deadline deadline)
      : registry_(registry), deadline_(deadline), prefix_(text("members of generation ", world.generation + 1, "/")) {
    for (int r = 0; r < world.size; ++r) keys_.push_back(text(prefix_, "rank ", r));
  }

  // Where there is none; returns the one that is kept.
  std::string enter(int rank, const std::string& value) {
    return registry_.enter(keys_[static_cast<std::size_t>(rank)], value, deadline_);
  }
  std::vector<Newcomer> enter_newcomers(const std::vector<Newcomer>& newcomers, Deadline deadline) {
    return parse(registry_.enter(prefix_ + "newcomers", print(newcomers), deadline));
  }

  // Every rank's. Ranks without one at the deadline are entered as lost.
  std::vector<std::string> complete() {
    try {
      return registry_.get(keys_, deadline_);
    } catch (const DeadlineExceeded& late) {
      const auto soon = Deadline::after(kToRead);
      for (const int rank : late.ranks()) registry_.enter(keys_[static_cast<std::size_t>(rank)], kLost, soon);
      return registry_.get(keys_, soon);
    }
  }

 private:
  Registry& registry_;
  const Deadline deadline_;
  const std::string prefix_;
  std::vector<std::string> keys_;
};

void invite(Registry& registry, const World& world, const Newcomer& newcomer, Deadline deadline) {
  registry.enter(key_of_invitation(newcomer.number),
                 text(world.generation, " ", world.size, " ", world.rank, " ", world.local_size, " ", world.local_rank),
                 deadline);
}

}  // namespace

World next_generation(const World& world, Registry& registry, const Change& change, Deadline deadline) {
  for (const int rank : change.lost) {
    if (rank < 0 || rank >= world.size) {
      throw InvalidArgument(text("regroup: rank ", rank, " is said to be lost; ranks are 0 to ", world.size - 1));
    }
  }
  Entries entries(world, registry, deadline);
  // Before this rank's own entry: whoever finds that has these too.
  if (!change.newcomers.empty()) entries.enter_newcomers(change.newcomers, deadline);
  // This rank enters itself before those that it takes for lost: where a link broke, each end takes the other for lost
  // although both are alive.
  if (entries.enter(world.rank, change.leaves ? kLeft : kOn + world.host) == kLost) {
    throw ClusterError(text("regroup: the others took rank ", world.rank, " for lost, and go on without it"));
  }
  for (const int rank : change.lost) {
    if (rank != world.rank) entries.enter(rank, kLost);  // a deadline's error may list this rank too
  }
  std::vector<std::string> hosts;  // of the next generation
  World next = world;
  next.generation = world.generation + 1;
  const auto members = entries.complete();
  for (int r = 0; r < world.size; ++r) {
    const auto& entry = members[static_cast<std::size_t>(r)];
    if (r == world.rank) next.rank = static_cast<int>(hosts.size());
    if (entry != kLost && entry != kLeft) hosts.push_back(entry.substr(kOn.size()));
  }
  const auto newcomers = entries.enter_newcomers({}, Deadline::after(kToRead));
  for (const auto& newcomer : newcomers) hosts.push_back(newcomer.host);
  next.size = static_cast<int>(hosts.size());
  const auto placed = [&](int rank) {
    auto place = next;
    place.rank = rank;
    place.host = hosts[static_cast<std::size_t>(rank)];
    place.local_size = place.local_rank = 0;
    for (int r = 0; r < place.size; ++r) {
      if (hosts[static_cast<std::size_t>(r)] != place.host) continue;
      if (r == rank) place.local_rank = place.local_size;
      ++place.local_size;
    }
    return place;
  };
  for (std::size_t i = 0; i < newcomers.size(); ++i) {
    invite(registry, placed(next.size - static_cast<int>(newcomers.size() - i)), newcomers[i],
           Deadline::after(kToRead));
  }
  return change.leaves ? next : placed(next.rank);
}

World invitation(const World& self, Registry& registry, std::int64_t newcomer, Deadline deadline) {
  const auto told = registry.get({key_of_invitation(newcomer)}, deadline)[0];
  if (told.starts_with(kRefused)) throw ClusterError(told.substr(kRefused.size()));
  auto world = self;
  std::istringstream(told) >> world.generation >> world.size >> world.rank >> world.local_size >> world.local_rank;
  return world;
}

bool was_invited(Registry& registry, std::int64_t newcomer, Deadline deadline) {
  return !registry.enter(key_of_invitation(newcomer), "", deadline).empty();
}

void refuse(Registry& registry, std::int64_t newcomer, const std::string& reason, Deadline deadline) {
  registry.enter(key_of_invitation(newcomer), kRefused + reason, deadline);
}

}  // namespace lockstep::elastic
