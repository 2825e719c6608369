#include "elastic/members.h"

#include <algorithm>
#include <cstddef>
#include <map>
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

std::string print(const std::vector<Process>& processes) {
  std::string lines;
  for (const auto& process : processes) lines += print(process) + "\n";
  return lines;
}

std::vector<Process> parse_processes(const std::string& printed) {
  std::vector<Process> processes;
  std::istringstream lines(printed);
  for (std::string line; std::getline(lines, line);) processes.push_back(parse_process(line));
  return processes;
}

std::string print(const Members& members) {
  const auto& world = members.world;
  std::string lines =
      text(world.generation, " ", world.size, " ", world.rank, " ", world.local_size, " ", world.local_rank, "\n");
  lines += print(members.processes);
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

namespace {

// Makes as many rows as `parts` allows: parts[p] lists those that have part p.
template <class Item>
std::vector<Item> put_together(const std::vector<std::vector<Item>>& parts) {
  const auto fewest =
      std::min_element(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); });
  std::vector<Item> rows;
  for (std::size_t row = 0; row < fewest->size(); ++row) {
    for (const auto& of_part : parts) rows.push_back(of_part[row]);
  }
  return rows;
}

}  // namespace

std::vector<int> whole_rows(const std::vector<int>& remaining, int row_size) {
  std::map<int, std::vector<int>> rows;
  for (const int rank : remaining) rows[rank / row_size].push_back(rank);
  std::vector<int> ranks;
  std::vector<std::vector<int>> others(static_cast<std::size_t>(row_size));  // [part]
  for (const auto& [row, of_row] : rows) {
    if (static_cast<int>(of_row.size()) == row_size) {
      ranks.insert(ranks.end(), of_row.begin(), of_row.end());
    } else {
      for (const int rank : of_row) others[static_cast<std::size_t>(rank % row_size)].push_back(rank);
    }
  }
  const auto more = put_together(others);
  ranks.insert(ranks.end(), more.begin(), more.end());
  return ranks;
}

std::vector<Process> whole_rows(const std::vector<Process>& newcomers, int row_size) {
  std::vector<std::vector<Process>> parts(static_cast<std::size_t>(row_size));
  for (const auto& newcomer : newcomers) {
    if (newcomer.part >= 0 && newcomer.part < row_size)
      parts[static_cast<std::size_t>(newcomer.part)].push_back(newcomer);
  }
  return put_together(parts);
}

}  // namespace lockstep::elastic
