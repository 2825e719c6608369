// Starts the processes of a job, watches them, and ends them together.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

namespace lockstep {

struct LaunchOptions {
  int processes = 1;  // on this host
  std::vector<std::string> command;
  std::string log_dir;        // each rank's output goes to rank-<n>.log there too; made where it is missing
  int restarts = 0;           // after a failure the job starts again so often
  double grace_seconds = 10;  // from SIGTERM to SIGKILL
};

// Runs the job, with each line of output behind its rank. Returns the exit status: 0 when all ranks ended with it, else
// that of the rank that failed first (128 and the signal's number where one ended it), which is named on `err` with the
// last line that it printed; or 128 and the number of the signal that asked this process to end. When a rank fails the
// others get SIGTERM, and SIGKILL after the grace time; SIGINT and SIGTERM are passed on, and a second one kills. When
// this returns, or is killed, no process of the job is left.
//
// Called by the first thread of a process without others. Throws InvalidArgument, ClusterError and IoError.
int launch(const LaunchOptions& options, std::ostream& out, std::ostream& err);

}  // namespace lockstep
