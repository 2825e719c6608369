// The interface of a backend of Group. One object a rank. Wrappers (checks, faults, timelines) are backends over a
// backend.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/failure.h"
#include "base/mutex.h"
#include "cluster/bootstrap.h"
#include "lockstep/collective/group.h"
#include "transport/shown_numbers.h"

namespace lockstep {

// Tells when calls have ended that were enqueued on a GPU. Any thread.
class EndOfCalls {
 public:
  using Listener = std::function<void(bool have_succeeded)>;

  // Calls `listener` once: in the thread that tells the end, or at once where that was told. A listener must not call
  // the Group.
  void then(Listener listener);

  // The first telling counts.
  void tell(bool have_succeeded);

  std::optional<bool> told();

 private:
  Mutex mutex_;
  std::optional<bool> told_ LOCKSTEP_GUARDED_BY(mutex_);
  std::vector<Listener> listeners_ LOCKSTEP_GUARDED_BY(mutex_);
};

// Calls that are enqueued on a GPU.
struct EnqueuedCalls {
  std::function<void()> join;  // makes the calls' streams wait for them
  std::function<bool()> done;
  std::shared_ptr<EndOfCalls> ended;
  const char* algorithm = "";
};

class GroupBackend {
 public:
  virtual ~GroupBackend() = default;

  virtual const char* name() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::int64_t generation() const = 0;  // the generation of the ranks' World

  // Carries out a call whose arguments check_call found right. Returns the name of the algorithm. One thread at a time.
  virtual const char* run(const Call& call, Deadline deadline) = 0;

  // Carries out sends and receives side by side.
  virtual const char* exchange(std::span<const Call> calls, Deadline deadline) = 0;

  // Enqueues calls on a GPU's buffers, side by side. One thread at a time. Throws InvalidArgument by default.
  virtual EnqueuedCalls enqueue(std::span<const Call> calls, Deadline deadline);

  // As Group::reaches. One thread at a time.
  virtual bool reaches(MemoryDevice device, Deadline /*deadline*/) { return device.type == MemoryDevice::Type::host; }

  // Throws what has failed, also where no call waits: PeerLost, during `operation`, for a rank whose process has ended,
  // and with `also_left` for one that has left. One thread at a time, as `run`.
  virtual void look(const char* operation, bool also_left) = 0;

  // Each rank shows the others a number by this. Null where ranks cannot. Valid as long as the backend is.
  virtual transport::ShownNumbers* numbers() { return nullptr; }

  // Waits for all that was enqueued, and throws as it would. Any thread.
  virtual void synchronize(Deadline /*deadline*/) {}

  // Prepares a split of the group, in which each rank gives the color and the key of Group::split; a rank whose color
  // is negative, or its alone, gives -1. Members of a color then call `make`. Collective. One thread at a time, as
  // `run`.
  virtual void begin_split(int /*color*/, int /*key*/, Deadline /*deadline*/) {}

  // A backend of the same kind for other members, of which this rank is one.
  virtual std::shared_ptr<GroupBackend> make(cluster::Bootstrap& members, Deadline deadline) const = 0;

  // As Group::allocate. Any thread.
  virtual Memory allocate(std::size_t bytes) = 0;

  // As Group::allocate_shared. One thread at a time, as `run`.
  virtual std::vector<Memory> allocate_shared(std::size_t /*bytes*/, Deadline /*deadline*/) { return {}; }

  // Fails the running operation and all later ones, on every rank. Any thread. The first failure is kept.
  virtual void fail(const Failure& failure) = 0;
};

}  // namespace lockstep

namespace lockstep::collective {

// Zeroed memory of this process alone, aligned to pages.
Memory private_memory(std::size_t bytes);

}  // namespace lockstep::collective
