// Job: which process this is among those that were started together, and the Groups they make. Torch-free.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/cluster/cluster.h"
#include "lockstep/collective/make_group.h"

namespace lockstep {

// Until all processes of a job have come.
inline constexpr double kStartTimeoutSeconds = 300;

// The one way from a launcher to a Group: strategies, DistributedDataParallel, Horovod and Estimator take it.
//
//   const auto job = lockstep::Job::from_environment();
//   const auto group = job.group();
//
// A shared handle; one thread at a time, but for `store`, `replica_group` and `abandon`, which any may call. All
// processes make their Jobs, and groups of each, in the same order. From the first Job on a process computes on its
// share of its host's cores alone, where other processes of the job are on that host.
class Job {
 public:
  // By the variables of the process's launcher (resolve_cluster); without any this process is alone. Waits until all
  // processes have come.
  //
  // Throws ClusterError, on all processes, where two are of one rank or disagree about their number, and where a
  // variable says what cannot be; and DeadlineExceeded naming the ranks that have not come after `timeout_seconds`.
  static Job from_environment(double timeout_seconds = kStartTimeoutSeconds);
  explicit Job(const Cluster& cluster, double timeout_seconds = kStartTimeoutSeconds);

  int rank() const { return world().rank; }
  int size() const { return world().size; }
  const World& world() const;

  // Whether whoever started the processes gave this one cores that no other of its host may use, as mpirun does.
  bool has_own_cores() const;

  // For what the processes tell each other: keys of this Job alone.
  Store store() const;

  // The Group of all processes. Throws as make_group.
  Group group(const GroupOptions& options = {}) const;

  // The Group of all replicas, `replicas` a process: replica `replica` of this process has rank
  // rank() * replicas + replica. Each calls it in a thread of its own. Throws as make_group.
  Group replica_group(int replicas, int replica, const GroupOptions& options = {}) const;

  // Those who wait for this process to make a group of this Job, now or later, hear why it will not: ClusterError.
  void abandon(const std::string& reason) const;

  // The job without the processes `lost`, by their ranks in this Job, which are those of its `group`: its next
  // generation. Collective over the others; those of them that have not come by the deadline, also where another was
  // lost unnoticed, are waited for until then and left out. Ranks keep their order, and processes their cores. Throws
  // ClusterError on a process that the others go on without, and where the process that holds the store is lost;
  // InvalidArgument for ranks that there are not. Where another is lost before the next Job's `group` is made, `group`
  // throws; then regroup that Job.
  //
  //   } catch (const lockstep::PeerLost& lost) {  // or DeadlineExceeded, with its ranks()
  //     job = job.regroup({lost.rank()}, lockstep::Deadline::after(std::chrono::seconds(10)));
  //     ranks.regroup(job.group());  // the Communicator that DistributedDataParallel was made with
  //   }
  //
  // For processes that outlive each other: launchers (lockstep run, mpirun, torchrun) end all when one is lost.
  Job regroup(const std::vector<int>& lost, Deadline deadline) const;

 private:
  struct State;
  explicit Job(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace lockstep
