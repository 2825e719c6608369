// The part of a job that runs on one host.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cluster/launch/child.h"
#include "cluster/launch/end_policy.h"

namespace lockstep::launch {

struct HostPart {
  int size = 1;   // ranks of the whole job
  int first = 0;  // the first rank here
  int count = 1;  // ranks here
  std::string host = "localhost";
  std::string store;       // "host:port"
  std::string host_store;  // the store on this host; empty: the job is not elastic
  std::string roles;       // LOCKSTEP_ROLES; empty: all ranks do the same
  int restart = 0;         // how often the job has started before
  std::vector<std::string> command;
  std::map<std::string, std::string> environment;  // beside what the host's own has
  std::string folder;                              // the command's working directory
  std::string log_dir;
  double grace_seconds = 0;
  int restarts = 0;  // of the workers of this part, and of its evaluator
  bool trusted_network = false;
  bool on_terminal = false;  // what ranks print ends on a terminal
  bool timeline = false;     // ranks put their timelines into the store
  bool elastic = false;
  std::vector<std::string> known_stores;  // not empty: its ranks come to a job that runs, whose hosts' stores these are
  std::string token;                      // in hexadecimal digits
};

// The commands that start its ranks; `token_file` holds the job's token.
std::vector<ChildCommand> ranks_of(const HostPart& part, const std::string& token_file);

// The end policy of the part's ranks, or of the launchers of all parts. `limits`: for an elastic job.
std::unique_ptr<EndPolicy> policy_of(const HostPart& part, const ElasticLimits& limits, JobStore& store,
                                     ChangingHosts* hosts = nullptr);

// Throws IoError. Does nothing for an empty path.
void make_folder(const std::string& path);

// One line of JSON, for the launcher of the part's host. part_in throws InvalidArgument for another line.
std::string line_of(const HostPart& part);
HostPart part_in(const std::string& line);

}  // namespace lockstep::launch
