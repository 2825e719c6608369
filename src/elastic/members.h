// Who takes part in a generation of a job.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/cluster/world.h"

namespace lockstep::elastic {

struct Process {
  std::string name;  // one word, unique in the job
  std::string host;
  std::string store = {};  // the address of its host's store
  int part = 0;            // of a newcomer: which part of a copy of the model it is to have (rows.h)
};

// The members of a generation, as one of them sees them.
struct Members {
  World world;                      // of this one
  std::vector<Process> processes;   // [rank]
  std::vector<std::string> stores;  // of all hosts that the job has had so far

  const Process& self() const { return processes[static_cast<std::size_t>(world.rank)]; }
};

// The beginning of a newcomer's name, with its LOCKSTEP_RANK and LOCKSTEP_RESTART; empty where no launcher gave them.
std::string name_of_newcomer(const std::string& launchers_rank, const std::string& restart);

// Words for a message that names members by their ranks in this generation: " (rank 1 is the launcher's rank 2)". By
// them a user finds the members' lines in the launcher's output. Empty where the numbers are equal, or the launcher's
// is not known.
std::string launchers_ranks(const Members& members, const std::vector<int>& ranks);

// Of a job's first generation, whose processes are on hosts with these names and stores: [rank].
std::string name_of_process(int rank);
Members first_members(const World& world, const std::vector<std::string>& hosts,
                      const std::vector<std::string>& stores);
// The same where all are on one host.
Members first_members(const World& world, const std::string& store = "");

// Adds a store that is not there yet.
void add_store(std::vector<std::string>& stores, const std::string& store);

// As text, and back.
std::string print(const Members& members);
Members parse_members(const std::string& printed, const World& self);  // `self`: whose host and address are kept
std::string print(const Process& process);                             // in one line
Process parse_process(const std::string& printed);

}  // namespace lockstep::elastic
