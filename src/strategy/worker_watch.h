// Finds that a worker is lost while this one waits for its devices, when no worker calls another.
#pragma once

#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "lockstep/cluster/store.h"
#include "lockstep/collective/communicator.h"

namespace lockstep::strategy {

// Waiting for keys of `store` throws `reason` from now on. Does nothing where the store is gone, and nobody waits
// there.
void fail_waiters(const Store& store, const std::string& reason);

// Its thread calls the other workers' watches once a second. Any thread may call.
class WorkerWatch {
 public:
  // `workers`: with a Group that nothing else uses. Where one is lost or fails, so does waiting for keys of `store`.
  WorkerWatch(Communicator workers, Store store);

  // Leaves, and so ends the others' watches. After at most a second, where no worker is lost.
  ~WorkerWatch();
  WorkerWatch(const WorkerWatch&) = delete;
  WorkerWatch& operator=(const WorkerWatch&) = delete;

  // Throws PeerLost where a worker is lost, DeadlineExceeded naming one whose watch does not answer, Aborted with the
  // reason where one has failed, and ClusterError ten seconds after one has left.
  void check() const;

  // This worker has failed: the others' `check` throws from now on.
  void abort(const std::string& reason) const { workers_.abort(reason); }

 private:
  void watch(const std::stop_token& stop);

  const Communicator workers_;
  const Store store_;
  mutable std::mutex mutex_;
  std::exception_ptr failure_;             // guarded by mutex_
  std::optional<Deadline> after_leaving_;  // of another worker; likewise
  std::jthread thread_;                    // last: it ends before what it uses
};

}  // namespace lockstep::strategy
