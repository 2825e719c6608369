// The hosts of a job, and which ranks run on which.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::launch {

struct HostSlots {
  std::string name;
  int slots = 1;  // ranks that it may run

  bool operator==(const HostSlots&) const = default;
};

// "host1:4,host2:4", "[fe80::1]:2"; without a number one slot. Throws InvalidArgument naming the entry.
std::vector<HostSlots> parse_hosts(const std::string& list);

// A host a line, "host", "host:4" or "host slots=4"; # begins a comment. Throws IoError, and InvalidArgument naming the
// line. Follows Open MPI's and Horovod's hostfiles.
std::vector<HostSlots> parse_hostfile(const std::string& contents, const std::string& name);
std::vector<HostSlots> read_hostfile(const std::string& path);

// The hosts in their order, with as many slots as run there: `processes` in all, or all that there are. Throws
// InvalidArgument where there are too few.
std::vector<HostSlots> fill(std::vector<HostSlots> hosts, std::optional<int> processes);

// "4", or "1:4": from the fewest to the most. Throws InvalidArgument.
std::pair<int, int> parse_nodes(const std::string& range);

std::string name_of_this_host();

// Whether the name is this machine's, where processes are started without ssh.
bool is_this_host(const std::string& name);

}  // namespace lockstep::launch
