// Watches the calls that a rank has enqueued on its GPU: the host does not wait for them, so nobody else would notice
// one that never ends.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "collective/backend.h"
#include "collective/gpus/cuda.h"
#include "lockstep/collective/group.h"

namespace lockstep::collective::gpus {

// One call, or several that were enqueued together.
struct WatchedCall {
  Call::Kind kind;
  std::int64_t number;          // of the last one that all ranks make, counted from 1
  std::vector<int> peers = {};  // of messages: the other ranks
  Moment end = {};
  Deadline deadline;
  std::shared_ptr<EndOfCalls> ended = std::make_shared<EndOfCalls>();
};

class Watch {
 public:
  // `problem` is asked now and then while calls run, and returns true where they can no longer end. It is told how long
  // the first of them has run. `on_late` is called for a call whose deadline has passed. After each of these the watch
  // ends, and no call is waited for. `on_idle` is called now and then while no call runs. `on_end` is called once for
  // each call, when it has ended, or is no longer watched; it must not call the watch.
  struct Events {
    std::function<bool(Deadline::Clock::duration runs)> problem;
    std::function<void()> on_idle;
    std::function<void(const WatchedCall&)> on_late;
    std::function<void(const WatchedCall&)> on_end;
    std::function<void(const std::string& why)> on_error;  // of the device
  };

  explicit Watch(Events events) : events_(std::move(events)) {}
  ~Watch();  // calls that still run are no longer watched
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void begin();  // before the first call
  void add(WatchedCall call);
  bool is_idle();  // no call runs

  // Returns true when no call runs, or the watch has ended; false where the deadline passed before.
  bool wait_for_all(Deadline deadline);

 private:
  std::optional<WatchedCall> next();
  std::optional<WatchedCall> late();
  bool ends();
  bool has_ended(const WatchedCall& call);
  void loop();
  void end() LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));

  const Events events_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<WatchedCall> running_ LOCKSTEP_GUARDED_BY(mutex_);
  bool ends_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::jthread thread_;
};

}  // namespace lockstep::collective::gpus
