// The hosts of a job, and how many ranks run on each: those that the user names, or a program of the user's.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launch {

struct HostSlots {
  std::string name;
  int slots = 1;  // ranks that it may run

  bool operator==(const HostSlots&) const = default;
};

// "host1:4,host2:4", "[fe80::1]:2"; without a number one slot. Throws InvalidArgument naming the entry.
std::vector<HostSlots> parse_hosts(const std::string& list);

// A host a line, "host", "host:4" or "host slots=4"; # begins a comment. Throws IoError, and InvalidArgument naming the
// line. Follows Open MPI's and Horovod's hostfiles.
std::vector<HostSlots> parse_hostfile(const std::string& contents, const std::string& name);
std::vector<HostSlots> read_hostfile(const std::string& path);

int slots_of(const std::vector<HostSlots>& hosts);  // of all

// The hosts in their order, with as many slots as run there: `processes` in all, or all that there are. Throws
// InvalidArgument where there are too few.
std::vector<HostSlots> fill(std::vector<HostSlots> hosts, std::optional<int> processes);

// "4", or "1:4": from the fewest to the most. Throws InvalidArgument.
std::pair<int, int> parse_nodes(const std::string& range);

// True where the name is this machine's, on which processes are started without ssh.
bool is_this_host(const std::string& name);

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

// Runs the user's program once a second, in a thread. The program prints a host a line, as a hostfile. Where it fails,
// says nothing for ten seconds, or prints another thing, a warning is logged once, and the hosts that it printed before
// stay. Follows Horovod's --host-discovery-script.
class HostDiscovery {
 public:
  // `command`: for the shell. Runs it for the first time; throws ClusterError and InvalidArgument saying what is wrong.
  // A host that failed is left out for `blacklist_seconds`, and twice as long each further time.
  HostDiscovery(std::string command, double blacklist_seconds);

  // The hosts named last; and those among them that are not left out. Their owner's thread calls these.
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
