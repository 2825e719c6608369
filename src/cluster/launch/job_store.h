// The job's stores, in which its launchers and processes tell each other how the job goes.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/cluster/store.h"

namespace lockstep::launch {

inline constexpr std::chrono::seconds kForStore(2);

// The name by which the launcher that started the job shows its presence, where the store is in etcd.
inline constexpr const char* kLauncher = "the launcher";

// A launcher's view of its job's stores. No call throws: where a store does not answer, the job goes on without the
// answer. The main thread calls these, but for rank_will_not_come.
class JobStore {
 public:
  // `job`: the store at which all ranks find each other. `here`: the store of an elastic job's processes on this host,
  // which may be the same one.
  JobStore(const Store& job, const Store& here) : address_(job.address()), job_(job), here_(here) {}

  // `address`: of the store `job`, which is connected to when it is asked. `here`: none where the job is not elastic.
  JobStore(std::string address, Access access, std::optional<Store> here)
      : address_(std::move(address)), access_(std::move(access)), here_(std::move(here)) {}

  // The rank has ended and will not come to the job's rendezvous any more: ranks that wait for it there get an error
  // now. Where the store cannot be told, their deadlines apply. Any thread.
  void rank_will_not_come(int rank) const;

  // A process of this host has ended, however: the others learn it from the store, or later.
  void process_has_ended(int process) const;

  // True where the launcher that started the job still lives, although its connection to this one broke.
  bool first_launcher_lives() const;

  // The rest is for elastic jobs. True where all ranks have found each other. True also where etcd does not answer: it
  // elects a leader, or cannot be reached, and a job that runs must not end for that.
  bool has_begun();

  // True where the process is among the latest members, and where that is not known. `joined_at_restart`: the
  // LOCKSTEP_RESTART of a process that came later; empty for others.
  bool is_member(int rank, const std::string& joined_at_restart) const;

  // Returns why a process that came later was not taken in (cluster::key_of_refusal); empty where it was not refused.
  std::string refusal(int rank, const std::string& restart) const;

  // True where the training has ended without the process that began as `rank`.
  bool was_left_out(int rank) const;

 private:
  Store job() const { return job_ ? *job_ : Store::connect(address_, Deadline::after(kForStore), access_); }

  const std::string address_;
  const Access access_;
  const std::optional<Store> job_, here_;
  bool has_begun_ = false;
};

// Returns the entry of `key`; empty where there is none, and where the store does not answer.
std::string entry(const Store& store, const std::string& key);

// Returns true where `name` has shown its presence in the store (cluster/liveness.h) and has ended.
bool has_ended(const Store& store, const std::string& name);

// Where an elastic job's members are, as `store` knows them; empty where it knows none.
struct MemberPlace {
  int rank = -1;  // its launcher's number; -1: it has none
  std::string store, host;
};
std::vector<MemberPlace> places_of_members(const Store& store);
std::vector<MemberPlace> parse_places(const std::string& printed);  // of the entry cluster::kMembersNow

}  // namespace lockstep::launch
