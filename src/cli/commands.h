// The subcommands' functions.
#pragma once

#include <filesystem>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/cluster/cluster.h"
#include "lockstep/collective/make_group.h"

namespace lockstep::cli {

// The cores that this process may use, and what bounds them.
void print_devices(std::ostream& out);

// Names, dtypes, shapes and entries of a checkpoint; of a folder, of its latest one. Throws as read_archive.
void print_checkpoint(const std::string& path, std::ostream& out);

// `lockstep bench collectives`: how long operations of a Group take, with a check of their results.
struct BenchOptions {
  std::string operation = "all_reduce";
  std::string dtype = "float32";
  GroupOptions group;
  int ranks = 2;
  std::vector<std::size_t> sizes;    // bytes; empty: from 4 bytes to 64 MiB
  bool any_buffer = false;           // memory of malloc instead of the group's `allocate`
  double seconds = 0.5;              // about how long each size is measured
  std::vector<std::string> command;  // how to start this program again, without options
  std::string ranks_per_host;        // "2": ranks 0 and 1 are one host, and so on; empty: all on one

  // Set in a process that is one rank of a run that is already going on.
  std::optional<World> world;
  std::string store;
  bool hold_store = false;
};

// Starts the ranks: as threads for the backend "threads", else as processes of this host. Prints rank 0's table, with a
// line of JSON at its end. Algorithm bandwidth and bus bandwidth are those of nccl-tests (doc/PERFORMANCE.md there).
// Returns the exit status: 1 where a result was wrong or a rank failed. Throws InvalidArgument.
int bench_collectives(BenchOptions options, std::ostream& out);

// `lockstep certs`: certificates for the processes of one job. Writes cert.pem and key.pem, which all processes of a
// job show, and ca.pem into `folder`, which must not have them. ca.pem is an authority that has certified this
// certificate and no other; its key is not kept. The certificates are valid for `days`. Throws InvalidArgument and
// IoError.
void make_certificates(const std::filesystem::path& folder, int days);

// `lockstep compile-for`: compiles a program's steps for a TPU that is not here. Runs `command` so that TPUStrategy
// compiles for `chips`, such as "v5e:2x4", until it launches its first step, and prints what each compiled step needs.
// Returns the exit status: 0 where all fit, 1 where one does not, else the command's. Throws Error where it cannot be
// started.
int compile_for(const std::string& chips, const std::vector<std::string>& command, std::ostream& out);

// `lockstep doctor`: whether a job can run where it is to run, before it does. Runs in each process of a job that
// `lockstep run` started. Finds out what the process may use and connects to the others over TCP. Rank 0 prints the
// findings of all, and what to do about problems. Returns the exit status: 1 where there is a problem.
int examine(const Cluster& cluster, std::ostream& out);

// Tells whether this machine has a TPU. Two files do: find_tpu.cc, and without_tpu.cc in a build without PJRT. "8 x TPU
// v5 lite, by libtpu.so", or "none", and why.
std::string find_tpu();

}  // namespace lockstep::cli
