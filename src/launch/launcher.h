// Starts the processes of a job, watches them, and ends them together.
#pragma once

#include <iosfwd>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/hosts.h"

namespace lockstep::launch {

struct LaunchOptions {
  std::optional<int> processes;  // else one, or one a slot where there are hosts
  std::vector<HostSlots> hosts;  // empty: this one
  // How others are reached, by words: it gets their names and a command. It must not ask: it has no terminal.
  std::string ssh = "ssh -o BatchMode=yes -o ConnectTimeout=20";
  std::vector<std::string> command;
  std::map<std::string, std::string> environment;  // that other hosts' ranks get, beside LOCKSTEP_...
  std::string log_dir;           // each rank's output goes to rank-<n>.log there too, on its host; made where missing
  int restarts = 0;              // after a failure the job starts again so often
  double grace_seconds = 10;     // from SIGTERM to SIGKILL
  bool trusted_network = false;  // as in Access
  std::string timeline;          // the file for what all ranks' groups did, of the last life; empty: none
};

// The variables of "NAME=VALUE"s; of a "NAME" with the value that it has here. Throws InvalidArgument where it has
// none.
std::map<std::string, std::string> exported_variables(const std::vector<std::string>& names);

// Runs the job, with each line of output behind its rank. Returns the exit status: 0 when all ranks ended with it, else
// that of the rank that failed first (128 and the signal's number where one ended it), which is named on `err` with the
// last line that it printed; or 128 and the number of the signal that asked this process to end. When a rank fails the
// others get SIGTERM, and SIGKILL after the grace time; SIGINT and SIGTERM are passed on, and a second one kills. When
// this returns, or is killed, no process of the job is left.
//
// On each other host it starts this program, by the same path and in the same folder, over ssh; what to run and the
// job's token go through its input, so no list of processes shows them.
//
// Called by the first thread of a process without others. Throws InvalidArgument, ClusterError and IoError.
int launch(const LaunchOptions& options, std::ostream& out, std::ostream& err);

// What it starts on another host: reads a part of a job from standard input, and runs it. Returns and throws the same.
int launch_part(std::ostream& out, std::ostream& err);

}  // namespace lockstep::launch
