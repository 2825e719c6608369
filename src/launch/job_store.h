// What launchers and the processes of a job tell each other in the job's stores.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "launch/processes.h"
#include "lockstep/cluster/store.h"

namespace lockstep::launch {

inline constexpr std::chrono::seconds kForStore(2);

// Of a store in etcd: the launcher that started the job has ended.
inline constexpr const char* kEndOfLauncher = "end of the launcher";

// Empty where there is none, and where the store does not answer.
std::string entry(const Store& store, const std::string& key);

// A rank that has ended will not come to the job's rendezvous any more: ranks that wait for it there get an error now.
// Where the store cannot be told, their deadlines apply.
void tell_that_it_ended(const std::function<Store()>& store, int rank);

// What an elastic job's launchers learn of their ranks from the store of their host.
void use_store(JobProcesses::Context& context, const Store& store);

// Where an elastic job's members are, as `store` knows them; empty where it knows none.
struct MemberPlace {
  int rank = -1;  // its launcher's number; -1: it has none
  std::string store, host;
};
std::vector<MemberPlace> places_of_members(const Store& store);
std::vector<MemberPlace> parse_places(const std::string& printed);  // of the entry cluster::kMembersNow

// After the ranks of a host have ended: keeps its store while the members need it to agree on who goes on, until the
// other launcher or a signal ends this; where that launcher is silent, half a minute.
void hold_store(const Store& store, ControlProtocol& control, const Signals& signals);

}  // namespace lockstep::launch
