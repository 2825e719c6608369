// Entries that the members of a job write for each other, in the stores of their hosts.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cluster/stores.h"
#include "elastic/members.h"

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
  Registry(std::shared_ptr<cluster::Stores> stores, const Members& members);

  // Sets the entry where there is none; returns the value that it keeps. Throws ClusterError where no majority answers
  // before the deadline, and where members do not agree in some hundred ballots. One store alone throws as compare_set.
  std::string enter(const std::string& key, const std::string& value, Deadline deadline);

  // Waits until all entries are there. DeadlineExceeded lists those that are missing, by their places in `keys`.
  std::vector<std::string> get(const std::vector<std::string>& keys, Deadline deadline);

  // --- What one store has, which others may not have.

  // Return the address of the store of this process's host, empty where there is none; and the value there of a key.
  const std::string& here() const { return here_; }
  std::string read_here(const std::string& key);

  // Sets the entry where there is none. Does nothing where that store does not answer.
  void tell(const std::string& store, const std::string& key, const std::string& value);

  const std::shared_ptr<cluster::Stores>& stores() const { return stores_; }
  bool passed(Deadline deadline) const { return stores_->passed(deadline); }

 private:
  struct Ballot;
  struct Accepted;
  struct Vote;
  struct Outcome;

  bool decides(const std::vector<bool>& votes) const;
  Vote change(const std::string& store, const std::string& key, const Ballot& ballot, const std::string* value);
  std::string read_at(const std::string& store, const std::string& key);  // empty also where it does not answer
  Outcome propose(const std::string& key, const std::string& value, int seen);

  const std::shared_ptr<cluster::Stores> stores_;
  const std::string name_;                    // this process's
  const std::string here_;                    // its host's store
  const std::vector<std::string> acceptors_;  // that of rank 0's host first
};

}  // namespace lockstep::elastic
