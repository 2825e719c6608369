#include "pjrt/event.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/mutex.h"
#include "lockstep/base/error.h"

namespace lockstep::pjrt {
namespace {

// Counts work that has not ended. The plugin tells at any time, also after the waiting thread has given up.
class Unfinished {
 public:
  Unfinished(const Plugin& plugin, std::shared_ptr<const void> used) : plugin_(plugin), used_(std::move(used)) {}
  ~Unfinished() {
    for (auto* const error : errors_) plugin_.free(error);
  }
  Unfinished(const Unfinished&) = delete;
  Unfinished& operator=(const Unfinished&) = delete;

  // PJRT_Event_Await has no deadline, so the plugin is asked to call.
  static void add(const std::shared_ptr<Unfinished>& unfinished, PJRT_Event* event, const std::string& what) {
    auto holder = std::make_unique<std::shared_ptr<Unfinished>>(unfinished);
    PJRT_Event_OnReady_Args args{.struct_size = PJRT_Event_OnReady_Args_STRUCT_SIZE,
                                 .event = event,
                                 .callback = &Unfinished::tell,
                                 .user_arg = holder.get()};
    {
      const MutexLock lock(unfinished->mutex_);
      ++unfinished->count_;
    }
    unfinished->plugin_.call(&PJRT_Api::PJRT_Event_OnReady, args, what);
    holder.release();
  }

  struct State {
    bool all_ended = false;
    bool any_failed = false;
  };

  // Until all work has ended, or it is `time`; or, unless `failed`, some has failed.
  State wait(Deadline::Clock::time_point time, bool failed = true) {
    const MutexLock lock(mutex_);
    while (count_ > 0 && (failed || errors_.empty())) {
      if (changed_.wait_until(mutex_, time) == std::cv_status::timeout) break;
    }
    return {count_ == 0, !errors_.empty()};
  }

  // The first, which the caller frees; null where none has failed.
  PJRT_Error* take_error() {
    const MutexLock lock(mutex_);
    return errors_.empty() ? nullptr : std::exchange(errors_[0], nullptr);
  }

 private:
  static void tell(PJRT_Error* error, void* holder) {
    const std::unique_ptr<std::shared_ptr<Unfinished>> owned(static_cast<std::shared_ptr<Unfinished>*>(holder));
    auto& unfinished = **owned;
    const MutexLock lock(unfinished.mutex_);
    if (error != nullptr) unfinished.errors_.push_back(error);
    --unfinished.count_;
    unfinished.changed_.notify_all();
  }

  const Plugin& plugin_;
  const std::shared_ptr<const void> used_;
  Mutex mutex_;
  CondVar changed_;
  int count_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::vector<PJRT_Error*> errors_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace

Event::Event(const Plugin& plugin, PJRT_Event* event) : event_(event, {&plugin}) {}

void Event::Free::operator()(PJRT_Event* event) const {
  PJRT_Event_Destroy_Args args{.struct_size = PJRT_Event_Destroy_Args_STRUCT_SIZE, .event = event};
  plugin->api().PJRT_Event_Destroy(&args);
}

void Event::wait(Deadline deadline, const std::string& what, std::shared_ptr<const void> used) const {
  const auto& plugin = *event_.get_deleter().plugin;
  const auto unfinished = std::make_shared<Unfinished>(plugin, std::move(used));
  Unfinished::add(unfinished, event_.get(), what);
  if (!unfinished->wait(deadline.time()).all_ended) throw DeadlineExceeded(what, deadline.waited(), {}, kNoAnswer);
  plugin.check(unfinished->take_error(), what);
}

void Event::wait_for_all(const std::vector<Event>& events, Deadline deadline,
                         std::chrono::duration<double> after_failure, const std::string& what,
                         const std::function<void()>& check) {
  if (events.empty()) return;
  constexpr std::chrono::milliseconds kBetweenChecks(100);
  const auto& plugin = *events[0].event_.get_deleter().plugin;
  const auto unfinished = std::make_shared<Unfinished>(plugin, nullptr);
  for (const auto& event : events) Unfinished::add(unfinished, event.event_.get(), what);
  const auto end = deadline.time();
  Unfinished::State state;
  do {
    state = unfinished->wait(check ? std::min(end, Deadline::Clock::now() + kBetweenChecks) : end, /*failed=*/false);
    if (check && !state.all_ended && !state.any_failed) check();
  } while (!state.all_ended && !state.any_failed && Deadline::Clock::now() < end);
  if (state.any_failed) state = unfinished->wait(std::min(end, Deadline::after(after_failure).time()));
  plugin.check(unfinished->take_error(), what);
  if (!state.all_ended) throw DeadlineExceeded(what, deadline.waited(), {}, kNoAnswer);
}

bool Event::has_ended() const noexcept {
  const auto& api = event_.get_deleter().plugin->api();
  PJRT_Event_IsReady_Args args{.struct_size = PJRT_Event_IsReady_Args_STRUCT_SIZE, .event = event_.get()};
  if (api.PJRT_Event_IsReady == nullptr) return false;
  if (auto* const error = api.PJRT_Event_IsReady(&args)) {
    event_.get_deleter().plugin->free(error);
    return false;
  }
  return args.is_ready;
}

}  // namespace lockstep::pjrt
