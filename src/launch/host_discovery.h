// A program of the user's that says which hosts there are.
#pragma once

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "launch/hosts.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launch {

// Hosts that failed are left out for some time: `seconds`, and twice as long each further time. Follows Horovod's
// --blacklist-cooldown-range.
class Blacklist {
 public:
  explicit Blacklist(double seconds) : seconds_(seconds) {}

  // Returns for how many seconds it is left out.
  double add(const std::string& host);
  bool has(const std::string& host) const;

 private:
  struct Entry {
    int failures = 0;
    Deadline until = Deadline::never();
  };
  const double seconds_;
  std::map<std::string, Entry> entries_;
};

// Runs the user's program once a second, in a thread. It prints a host a line, as a hostfile; one that fails, says
// nothing for ten seconds, or prints another thing is warned of once, and the hosts that it printed before stay.
// Follows Horovod's --host-discovery-script.
class HostDiscovery {
 public:
  // `command`: for the shell. Runs it for the first time; throws ClusterError and InvalidArgument saying what is wrong.
  // A host that failed is left out for `blacklist_seconds`, and twice as long each further time.
  HostDiscovery(std::string command, double blacklist_seconds);

  // Those that it named last; and those of them that are not left out. Their owner's thread calls these.
  std::vector<HostSlots> hosts();
  std::vector<HostSlots> usable_hosts();

  // The host failed. Returns for how many seconds it is left out, also when the job starts again.
  double leave_out(const std::string& host) { return failed_.add(host); }

 private:
  std::vector<HostSlots> ask(const std::stop_token& stop) const;
  void ask_again(const std::stop_token& stop);

  const std::string command_;
  Mutex mutex_;
  std::vector<HostSlots> hosts_ LOCKSTEP_GUARDED_BY(mutex_);
  Blacklist failed_;     // of the owner's thread
  std::string problem_;  // of the thread: the last one
  std::jthread thread_;
};

}  // namespace lockstep::launch
