// Entries that the members of a job write for each other, in the stores of their hosts.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "elastic/members.h"
#include "elastic/stores.h"

namespace lockstep::elastic {

// The registry of the members of one generation. An entry keeps its first value, so all members find the same one,
// whenever they read. Hosts may be lost, and links between them break: a majority of the members' hosts accepts an
// entry. So at most one part of a divided job can go on. Of two equal halves, the one with rank 0's host decides.
//
// Each entry is decided by Paxos (Lamport, "Paxos Made Simple", 2001). The stores are the acceptors. The members are
// the proposers; they change an acceptor's state by compare_set. One store alone decides by itself.
//
// Any thread, but `enter` and `get` one at a time. Throws DeadlineExceeded and ClusterError where the store of this
// process's host does not answer.
class Registry {
 public:
  Registry(std::shared_ptr<Stores> stores, const Members& members);

  // Sets the entry where there is none; returns the value that it keeps. Throws ClusterError where no majority answers
  // before the deadline, and where members do not agree in some hundred ballots. One store alone throws as compare_set.
  std::string enter(const std::string& key, const std::string& value, Deadline deadline);

  // Waits until all entries are there. DeadlineExceeded lists those that are missing, by their places in `keys`.
  std::vector<std::string> get(const std::vector<std::string>& keys, Deadline deadline);

  // --- What one store has, which others may not have.

  // Return the address of the store of this process's host, empty where there is none; and the value there of a key.
  const std::string& here() const { return here_; }
  std::string read_here(const std::string& key);
  std::string read_at(const std::string& store, const std::string& key);  // empty also where it does not answer

  // Sets the entry where there is none. Does nothing where that store does not answer.
  void tell(const std::string& store, const std::string& key, const std::string& value);

  // Returns whether each process has ended, or its host has not answered for some time. Any thread.
  std::vector<char> have_gone(const std::vector<Process>& processes);
  bool has_gone(const Process& process) { return have_gone({process})[0] != 0; }

  bool passed(Deadline deadline) const { return stores_->passed(deadline); }

 private:
  struct Ballot;
  struct Accepted;
  struct Vote;
  struct Outcome;

  bool decides(const std::vector<bool>& votes) const;
  Vote change(const std::string& store, const std::string& key, const Ballot& ballot, const std::string* value);
  Outcome propose(const std::string& key, const std::string& value, int seen);
  bool has_ended_or_is_silent(const Process& process);

  struct Silence {
    double since = 0;
    int looks = 0;
  };

  const std::shared_ptr<Stores> stores_;
  const std::string name_;                    // this process's
  const std::string here_;                    // its host's store
  const std::vector<std::string> acceptors_;  // that of rank 0's host first
  Mutex mutex_;
  std::map<std::string, Silence> silences_ LOCKSTEP_GUARDED_BY(mutex_);  // [store]
};

// Return the key of the entry that a process leaves when it ends; and an object whose end makes that entry.
std::string key_of_end(const std::string& name);
std::shared_ptr<void> show_presence(const Store& store, const std::string& name);

}  // namespace lockstep::elastic
