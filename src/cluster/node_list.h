// Slurm's node lists: "node[1-3,07],other".
#pragma once

#include <string>
#include <vector>

namespace lockstep::cluster {

// The nodes, in order. Throws ClusterError naming `variable` where the list is malformed, or has more than 100,000.
std::vector<std::string> expand_node_list(const std::string& list, const std::string& variable);

// Returns the tasks of each node, from "2(x3),1" (three nodes of two, one of one). Throws as expand_node_list does.
std::vector<int> expand_task_counts(const std::string& counts, const std::string& variable);

}  // namespace lockstep::cluster
