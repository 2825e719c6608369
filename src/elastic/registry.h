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

// Of the members of one generation. The first value of an entry stays, so that all find the same, whenever they read.
// Hosts may be lost, and links between them break: an entry is what a majority of the members' hosts has accepted, so
// that at most one part of a job that was divided can go on. Where they are even, the half with rank 0's host decides.
//
// Each entry is decided by Paxos (Lamport, "Paxos Made Simple", 2001). The stores are the acceptors; the members, which
// are the proposers, change an acceptor's state by compare_set. One store needs no such thing.
//
// Any thread, but `enter` and `get` one at a time. Throws DeadlineExceeded and ClusterError where the store of this
// process's host does not answer.
class Registry {
 public:
  Registry(std::shared_ptr<Stores> stores, const Members& members);

  // Sets the entry where there is none; returns the value that it keeps. Throws ClusterError where no majority answers
  // before the deadline, and where the members cannot agree in some hundred ballots; with one store, as that does.
  std::string enter(const std::string& key, const std::string& value, Deadline deadline);

  // Waits until all are there. DeadlineExceeded lists, by their places in `keys`, those that are not.
  std::vector<std::string> get(const std::vector<std::string>& keys, Deadline deadline);

  // --- What one store has, which others may not have.

  // Of this process's host, whose address `here` is; empty where there is none.
  const std::string& here() const { return here_; }
  std::string read_here(const std::string& key);
  std::string read_at(const std::string& store, const std::string& key);  // empty also where it does not answer

  // Where there is none. Does nothing where that store does not answer.
  void tell(const std::string& store, const std::string& key, const std::string& value);

  // Whether each of the processes has ended, or its host does not answer for some time. Any thread.
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
  const std::string name_;                    // of this process
  const std::string here_;                    // its host's store
  const std::vector<std::string> acceptors_;  // rank 0's host's first
  Mutex mutex_;
  std::map<std::string, Silence> silences_ LOCKSTEP_GUARDED_BY(mutex_);  // [store]
};

// The entry that a process leaves behind when it ends; and what makes it do so while that lives.
std::string key_of_end(const std::string& name);
std::shared_ptr<void> show_presence(const Store& store, const std::string& name);

}  // namespace lockstep::elastic
