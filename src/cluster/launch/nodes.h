// Launchers that the user, or a scheduler, starts on their hosts one by one: how they find each other.
#pragma once

#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cluster/launch/job_store.h"
#include "lockstep/base/deadline.h"
#include "lockstep/cluster/store.h"

namespace lockstep::launch {

struct NodeLimits {
  int fewest = 1, most = 1;       // hosts
  double last_call_seconds = 30;  // how long `fewest` wait for another one
};

// A node's place in the job that it begins or joins.
struct NodePlace {
  std::string host;    // a name that no other node of the job has, or had
  int first = 0;       // its first rank
  int size = 0;        // ranks of all
  bool joins = false;  // a job that runs
};

// A launcher's host in the job's store. While this lives, the others see that the launcher does. Follows the rendezvous
// of torchrun. Its calls throw as Store's.
class Node {
 public:
  Node(Store store, int processes);

  // Waits until `fewest` nodes have come, and as many as there may be or no other one for last_call_seconds. A node
  // that comes later waits until the members of the job are on fewer than `most` hosts. Nothing where stop(), asked ten
  // times a second, says so. Throws DeadlineExceeded after ten minutes. `err` gets what this waits for.
  std::optional<NodePlace> wait(const NodeLimits& limits, const std::function<bool()>& stop, std::ostream& err);

  const std::string& host() const { return host_; }

  // After `wait`: until the job has begun, the ranks of nodes that were to begin it and have ended since, whose
  // launchers are lost. Nothing once it has begun. Any thread.
  std::optional<std::vector<int>> ranks_that_will_not_come() const;

 private:
  struct Entry;
  std::optional<NodePlace> come(const NodeLimits& limits, std::string& waits_for);
  std::optional<NodePlace> join(const NodeLimits& limits, std::string& waits_for);
  void take_name();
  bool has_ended(const std::string& host) const;
  std::vector<MemberPlace> members() const;

  const Store store_;
  const int processes_;
  std::string host_;
  std::shared_ptr<void> presence_;
  std::string seen_;  // the entry of nodes, when it had changed
  Deadline last_call_ = Deadline::never();
};

}  // namespace lockstep::launch
