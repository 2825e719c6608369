// Starts the processes of a job, watches them, and ends them together.
#pragma once

#include <iosfwd>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cluster/launch/hosts.h"
#include "cluster/launch/nodes.h"

namespace lockstep::launch {

struct LaunchOptions {
  std::optional<int> processes;  // else one, or one a slot where there are hosts
  std::vector<HostSlots> hosts;  // empty: this one

  // The job goes on without processes that fail, while so many are left: for programs whose processes regroup (Job::
  // regroup). On hosts the job goes on without lost hosts too, also this one. 0: the first failure ends it.
  int min_processes = 0;

  // For such a job, in place of `hosts`: a program for the shell that prints the hosts that there are (HostDiscovery).
  // The most processes at a time; 0: no bound. A host that failed is not taken again for `blacklist_seconds`, and twice
  // as long each further time.
  std::string host_discovery;
  int max_processes = 0;
  double blacklist_seconds = 10;

  // Not empty: the hosts are those on which the user, or a scheduler, starts `lockstep run`, `processes` on each. They
  // find each other at `store`, which may also be "host:port": the launcher on that host holds it. The job goes on
  // without hosts that are lost, and others may join it later. `store` may then be that of any host that takes part.
  // Follows torchrun.
  std::optional<NodeLimits> nodes;

  // For an elastic job: "etcd://host:port,host:port/job" (Store::connect). Its processes meet there, not in stores of
  // their own, so that any of its hosts may be lost. Without a name the job gets a random one.
  std::string store;

  // Processes with parameter servers, and a chief: both above 0, or both 0. `processes` is then the sum, or unset.
  int workers = 0, servers = 0;
  bool evaluator = false;
  // The command that reaches another host, split into words; the host's name and a command are appended. It has no
  // terminal, so it must not prompt.
  std::string ssh = "ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=10 -o ServerAliveCountMax=3";
  std::vector<std::string> command;
  std::map<std::string, std::string> environment;  // for ranks on other hosts, beside LOCKSTEP_...
  std::string log_dir;  // each rank's output goes to rank-<n>.log there too, on its host; made where missing
  // How often the job is started again after a failure. With parameter servers: how often processes of each role are
  // started again on each host: workers that failed, servers and the chief where a signal ended them. With
  // min_processes: how often a process is started in the place of one that failed, to join those that go on. Where
  // nobody goes on, a start of the whole job counts as one.
  int restarts = 0;
  double grace_seconds = 10;     // from SIGTERM to SIGKILL
  bool trusted_network = false;  // as in Access
  std::string certificates;      // as in Access: a folder, at the same path on all hosts; empty: none
  std::string timeline;          // the file for the timelines of all ranks' groups, of the last run; empty: none
};

// Returns the variables of entries "NAME=VALUE"; an entry "NAME" takes its value from this environment. Throws
// InvalidArgument where it has none.
std::map<std::string, std::string> exported_variables(const std::vector<std::string>& names);

// Runs the job and prefixes each line of output with its rank. Returns the exit status: 0 when all ranks ended with 0,
// else that of the rank that failed first: 128 plus the signal's number where a signal ended it. `err` gets that rank
// and the last line that it printed. Where a signal asked this process to end, `launch` returns 128 plus the signal's
// number. When a rank fails the others get SIGTERM, and SIGKILL after the grace time; SIGINT and SIGTERM are passed on,
// and a second one kills. When this returns, or is killed, no process of the job is left. Exceptions are an elastic
// job's processes on other hosts, where this is killed or these can no longer be reached.
//
// On each other host it starts this program over ssh, by the same path and in the same folder. The command and the
// job's token go through standard input, so that no process list shows them.
//
// Must be called by the main thread of a process without others. Throws InvalidArgument, ClusterError and IoError.
int launch(const LaunchOptions& options, std::ostream& out, std::ostream& err);

// As `launch` with LaunchOptions::nodes, for this host's ranks: one of the launchers that find each other.
int launch_node(const LaunchOptions& options, std::ostream& out, std::ostream& err);

// Reads a part of a job from standard input, and runs it: `launch` starts this on another host. Returns and throws as
// `launch`; prints to standard output and standard error.
int launch_part();

}  // namespace lockstep::launch
