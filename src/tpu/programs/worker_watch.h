// Finds that a worker is lost while this one waits for its devices, when no worker calls another.
#pragma once

#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "lockstep/collective/communicator.h"

namespace lockstep::programs {

// Its thread calls the other workers' watches once a second. Any thread may call its functions.
class WorkerWatch {
 public:
  // `workers`: with a Group that nothing else uses. The thread calls `on_failure` where one is lost or has failed.
  WorkerWatch(Communicator workers, std::function<void(const std::string& reason)> on_failure);

  // Leaves, and so ends the others' watches; takes a second at most, where no worker is lost.
  ~WorkerWatch();
  WorkerWatch(const WorkerWatch&) = delete;
  WorkerWatch& operator=(const WorkerWatch&) = delete;

  // Throws PeerLost where a worker is lost, DeadlineExceeded naming one whose watch does not answer, and Aborted with
  // the reason where one has failed. Throws ClusterError ten seconds after one has left.
  void check() const;

  // This worker has failed: the others' `check` throws from now on.
  void abort(const std::string& reason) const { workers_.abort(reason); }

 private:
  void watch(const std::stop_token& stop);

  const Communicator workers_;
  const std::function<void(const std::string& reason)> on_failure_;
  mutable std::mutex mutex_;
  std::exception_ptr failure_;             // guarded by mutex_
  std::optional<Deadline> after_leaving_;  // set when another worker has left; guarded likewise
  std::jthread thread_;                    // last: it ends before what it uses
};

}  // namespace lockstep::programs
