// Job: which process this is among those that were started together, and the Groups they make. Torch-free.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/cluster/cluster.h"
#include "lockstep/collective/make_group.h"

namespace lockstep {

namespace cluster {
class ConnectedStores;
}
namespace elastic {
class Registry;
struct Change;
struct Members;
}  // namespace elastic

// Makes Groups from what a launcher set up. Strategies, DistributedDataParallel, Horovod and Estimator all use it.
//
//   const auto job = lockstep::Job::from_environment();
//   const auto group = job.group();
//
// A shared handle for one thread at a time; any thread may call `store`, `replica_group` and `fail_waiters`. All
// processes make their Jobs, and groups of each, in the same order. From the first Job on, where other processes of the
// job are on its host, a process computes only on its share of the host's cores.
class Job {
 public:
  // Reads the variables of the process's launcher (resolve_cluster); without any this process is alone. Waits until all
  // processes have joined.
  //
  // Throws ClusterError, on all processes, where two have one rank or disagree about their number, and where a variable
  // is invalid. Throws ClusterError where the process comes to a job that runs: only elastic strategies can join one.
  // Throws DeadlineExceeded naming the ranks that have not joined after `timeout_seconds`.
  static Job from_environment(double timeout_seconds = kStartTimeoutSeconds);
  explicit Job(const Cluster& cluster, double timeout_seconds = kStartTimeoutSeconds);

  int rank() const { return world().rank; }
  int size() const { return world().size; }
  const World& world() const;

  // Returns true where the launcher gave this process cores that no other of its host may use, as mpirun does.
  bool has_own_cores() const;

  // Returns a store for the processes' messages, with keys of this Job alone. A regroup may change its host.
  Store store() const;

  // Makes the Group of all processes. Throws as make_group.
  Group group(const GroupOptions& options = {}) const;

  // Makes the Group of all replicas, `replicas` in each process. Replica `replica` of this process calls it in a thread
  // of its own and has rank rank() * replicas + replica. Throws as make_group.
  Group replica_group(int replicas, int replica, const GroupOptions& options = {}) const;

  // Gives processes that wait for this one to make a group of this Job, now or later, a ClusterError with `reason`.
  void fail_waiters(const std::string& reason) const;

  // Makes the next generation of the job, without the processes `lost` (their ranks in this Job, which are those of its
  // `group`). Collective over the others; those that do not call it by the deadline are left out as well. Ranks keep
  // their order, and processes their cores. Throws ClusterError on a process that the others left out, and where the
  // store's process or most hosts are lost; InvalidArgument for ranks that do not exist. Where another process is lost
  // before the next Job's `group` is made, `group` throws; then regroup that Job.
  //
  //   } catch (const lockstep::PeerLost& lost) {  // or DeadlineExceeded, with its ranks()
  //     job = job.regroup({lost.rank()}, lockstep::Deadline::after(std::chrono::seconds(10)));
  //     ranks.regroup(job.group());  // the Communicator that DistributedDataParallel was made with
  //   }
  //
  // It is for processes that outlive each other: `lockstep run --min-n`. Other launchers end all when one is lost.
  Job regroup(const std::vector<int>& lost, Deadline deadline) const;

  // --- For elastic strategies (src/elastic).

  // Makes the Job of a process that comes to a job that runs (Cluster::joins). The process is alone until it takes the
  // place that the members have given it.
  static Job newcomer(const Cluster& cluster, double timeout_seconds);
  bool is_newcomer() const;
  Job joined(const elastic::Members& members) const;

  // Makes the next generation as the other `regroup` does, with any change of the members.
  Job regroup(const elastic::Change& change, Deadline deadline) const;

  // Return the members, and the stores in which they write who is one.
  const elastic::Members& members() const;
  std::shared_ptr<elastic::Registry> registry() const;
  std::shared_ptr<cluster::ConnectedStores> stores() const;

 private:
  struct State;
  explicit Job(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace lockstep
