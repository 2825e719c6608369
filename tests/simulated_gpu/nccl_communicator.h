// One rank's communicator of the simulated NCCL.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "cuda_runtime.h"
#include "lockstep/collective/group.h"
#include "nccl_operations.h"
#include "nccl_rendezvous.h"

namespace simulated_nccl {

// An operation that was called, and its stream.
struct Queued {
  Operation operation;
  cudaStream_t stream;
};

// Connecting and finalizing go on in detached threads, which share the ownership. A function that starts one returns
// kInProgress, or waits for it where the communicator blocks. Functions throw Failed. Any thread may call.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(int device, bool blocking) : device_(device), blocking_(blocking) {}

  // Connects the ranks through the store at `location`. Collective.
  int init(const std::string& location, int rank, int size);

  // Connects `made` to the ranks that give its color, and to none where the color is negative. Calls `publish` when
  // that is done. Collective.
  int split(int color, int key, const std::shared_ptr<Communicator>& made, const std::function<void()>& publish);

  // Waits for all operations and all ranks. Collective.
  int finalize();

  // Waits as finalize does, unless that was done, and leaves the other ranks.
  void destroy();

  // Ends this rank's operations: the one that runs, and later ones at once. Returns when none runs.
  void end(const std::string& reason);

  // Puts the operations into their streams, where they go on side by side.
  int launch(const std::vector<Queued>& queued);

  // Throws while something is kInProgress, and for an error.
  void require_settled() const;

  // Throws while operations run.
  void require_idle() const;

  // Throws unless operations may be called.
  void require_ready() const;

  int result() const;  // of ncclCommGetAsyncError
  std::string error() const;
  bool blocking() const { return blocking_; }
  int device() const { return device_; }
  Member member() const;

 private:
  struct Launched;
  class Turn;

  // Calls work() in a thread.
  int start(const std::function<void()>& work);

  // Calls work(), and keeps the result.
  void carry_out(const std::function<void()>& work);

  // Between the two the communicator is kInProgress.
  void begin();
  void settle(int result, const std::string& error);

  void connect(const lockstep::Store& store, int rank, int size);
  void connect_by_color(const lockstep::Store& store, const Member& parent, int color, int key);

  void enqueue(const std::vector<Queued>& queued, std::unique_ptr<Launched> launched);
  void run(const Launched& launched);

  void wait_until_ended() const;
  bool ended() const;
  lockstep::Group group() const;
  std::string store_of(int rank) const;

  const int device_;
  const bool blocking_;

  mutable lockstep::Mutex mutex_;
  mutable lockstep::CondVar changed_;
  int result_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::string error_ LOCKSTEP_GUARDED_BY(mutex_);
  bool ended_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  bool finalized_ LOCKSTEP_GUARDED_BY(mutex_) = false;

  // The following are set when the ranks are connected.
  Member member_ LOCKSTEP_GUARDED_BY(mutex_);
  std::optional<lockstep::Group> group_ LOCKSTEP_GUARDED_BY(mutex_);  // until it ends
  std::optional<lockstep::Store> store_ LOCKSTEP_GUARDED_BY(mutex_);  // for those that are made of this one
  std::vector<std::string> stores_ LOCKSTEP_GUARDED_BY(mutex_);       // where the ranks' such stores are
  int children_ LOCKSTEP_GUARDED_BY(mutex_) = 0;                      // numbers those
  std::weak_ptr<Communicator> child_ LOCKSTEP_GUARDED_BY(mutex_);     // the one that is being made

  // The following order what was launched.
  std::uint64_t next_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::uint64_t turn_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // the number that may run
  bool running_ LOCKSTEP_GUARDED_BY(mutex_) = false;
};

}  // namespace simulated_nccl
