// Who takes part in a generation of a job, and which ranks make up whole rows of a mesh.
#pragma once

#include <string>
#include <vector>

#include "lockstep/cluster/world.h"

namespace lockstep::elastic {

struct Process {
  std::string name;  // one word, unique in the job
  std::string host;
  std::string store = {};  // the address of its host's store
  int part = 0;            // a newcomer's part of a copy of the model (members.h)
};

// The members of a generation, as one of them sees them.
struct Members {
  World world;                      // this member's
  std::vector<Process> processes;   // [rank]
  std::vector<std::string> stores;  // those of all hosts that the job has had so far

  const Process& self() const { return processes[static_cast<std::size_t>(world.rank)]; }
};

// Returns the beginning of a newcomer's name: LOCKSTEP_RANK and LOCKSTEP_RESTART; empty where no launcher set them.
std::string name_of_newcomer(const std::string& launchers_rank, const std::string& restart);

// Returns words for a message with ranks of this generation: " (rank 1 is the launcher's rank 2)". By the launcher's
// number a user finds a member's lines in its output. Empty where the numbers are equal, or it is not known.
std::string launchers_ranks(const Members& members, const std::vector<int>& ranks);

// Names a process of a job's first generation, and makes its Members: `hosts` and `stores` are [rank].
std::string name_of_process(int rank);
Members first_members(const World& world, const std::vector<std::string>& hosts,
                      const std::vector<std::string>& stores);
// Makes the members of a job whose processes are all on one host.
Members first_members(const World& world, const std::string& store = "");

// Adds a store that is not there yet.
void add_store(std::vector<std::string>& stores, const std::string& store);

// Print as text, and parse the text.
std::string print(const Members& members);
Members parse_members(const std::string& printed, const World& self);  // `self`: the host and address to keep
std::string print(const Process& process);                             // in one line
Process parse_process(const std::string& printed);
std::string print(const std::vector<Process>& processes);  // a line each
std::vector<Process> parse_processes(const std::string& printed);

// Rows of a mesh: the ranks that have one copy of a model together, each a part of it.

// Rank r has part r % row_size of row r / row_size; ranks with the same part have the same state. `remaining` ascends.
// Returns the ranks that make up whole rows, in the order of their next ranks. Rows that are still whole come first, in
// their order; then rows that are put together of ranks whose own rows are broken.
std::vector<int> whole_rows(const std::vector<int>& remaining, int row_size);

// Returns the newcomers that make up whole rows, one row after the other.
std::vector<Process> whole_rows(const std::vector<Process>& newcomers, int row_size);

}  // namespace lockstep::elastic
