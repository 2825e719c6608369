#include "elastic/members.h"

#include <algorithm>
#include <optional>
#include <sstream>

#include "base/text.h"
#include "cluster/rendezvous.h"

namespace lockstep::elastic {

void add_store(std::vector<std::string>& stores, const std::string& store) {
  if (std::find(stores.begin(), stores.end(), store) == stores.end()) stores.push_back(store);
}

namespace {

std::optional<int> launchers_rank(const Process& process) {
  for (const std::string beginning : {cluster::kProcess, cluster::kNewcomer}) {
    if (!process.name.starts_with(beginning)) continue;
    const auto rest = process.name.substr(beginning.size());
    return whole_number<int>(rest.substr(0, rest.find('-')));
  }
  return std::nullopt;
}

}  // namespace

std::string name_of_process(int rank) { return text(cluster::kProcess, rank); }

std::string name_of_newcomer(const std::string& launchers_rank, const std::string& restart) {
  return text(cluster::kNewcomer, launchers_rank, "-", restart, "-");
}

std::string launchers_ranks(const Members& members, const std::vector<int>& ranks) {
  std::vector<std::string> other;
  for (const int rank : ranks) {
    if (rank < 0 || rank >= static_cast<int>(members.processes.size())) continue;
    const auto theirs = launchers_rank(members.processes[static_cast<std::size_t>(rank)]);
    if (theirs && *theirs != rank) other.push_back(text("rank ", rank, " is the launcher's rank ", *theirs));
  }
  return other.empty() ? "" : text(" (", join(other), ")");
}

Members first_members(const World& world, const std::vector<std::string>& hosts,
                      const std::vector<std::string>& stores) {
  Members members{.world = world, .processes = {}, .stores = {}};
  for (std::size_t r = 0; r < hosts.size(); ++r) {
    members.processes.push_back({name_of_process(static_cast<int>(r)), hosts[r], stores[r]});
    add_store(members.stores, stores[r]);
  }
  return members;
}

Members first_members(const World& world, const std::string& store) {
  const auto size = static_cast<std::size_t>(world.size);
  return first_members(world, std::vector<std::string>(size, world.host), std::vector<std::string>(size, store));
}

// The host's name comes last: it may have spaces.
std::string print(const Process& process) {
  return text(process.name, " ", process.store, " ", process.part, " ", process.host);
}

Process parse_process(const std::string& printed) {
  Process process;
  std::istringstream words(printed);
  words >> process.name >> process.store >> process.part >> std::ws;
  std::getline(words, process.host);
  return process;
}

std::string print(const Members& members) {
  const auto& world = members.world;
  std::string lines =
      text(world.generation, " ", world.size, " ", world.rank, " ", world.local_size, " ", world.local_rank, "\n");
  for (const auto& process : members.processes) lines += print(process) + "\n";
  for (const auto& store : members.stores) lines += store + "\n";
  return lines;
}

Members parse_members(const std::string& printed, const World& self) {
  Members members{.world = self, .processes = {}, .stores = {}};
  auto& world = members.world;
  std::istringstream lines(printed);
  lines >> world.generation >> world.size >> world.rank >> world.local_size >> world.local_rank >> std::ws;
  for (std::string line; std::getline(lines, line);) {
    if (static_cast<int>(members.processes.size()) < world.size)
      members.processes.push_back(parse_process(line));
    else
      members.stores.push_back(line);
  }
  return members;
}

}  // namespace lockstep::elastic
