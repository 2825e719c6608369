#include "pjrt/event.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "base/mutex.h"
#include "lockstep/base/error.h"

namespace lockstep::pjrt {
namespace {

// What the plugin says of an event's end, at any time, also after the waiting thread has given up.
class Notice {
 public:
  Notice(const Plugin& plugin, std::shared_ptr<const void> used) : plugin_(plugin), used_(std::move(used)) {}
  ~Notice() {
    if (error_) plugin_.free(*error_);  // nobody waits any more
  }
  Notice(const Notice&) = delete;
  Notice& operator=(const Notice&) = delete;

  static void tell(PJRT_Error* error, void* holder) {
    const std::unique_ptr<std::shared_ptr<Notice>> owned(static_cast<std::shared_ptr<Notice>*>(holder));
    auto& notice = **owned;
    const MutexLock lock(notice.mutex_);
    notice.error_ = error;
    notice.changed_.notify_all();
  }

  // The work's error, which the caller frees; nothing where it has not ended by then.
  std::optional<PJRT_Error*> wait(Deadline::Clock::time_point time) {
    const MutexLock lock(mutex_);
    while (!error_) {
      if (changed_.wait_until(mutex_, time) == std::cv_status::timeout && !error_) return std::nullopt;
    }
    return std::exchange(error_, nullptr);
  }

 private:
  const Plugin& plugin_;
  const std::shared_ptr<const void> used_;
  Mutex mutex_;
  CondVar changed_;
  std::optional<PJRT_Error*> error_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace

Event::Event(const Plugin& plugin, PJRT_Event* event) : event_(event, {&plugin}) {}

void Event::Free::operator()(PJRT_Event* event) const {
  PJRT_Event_Destroy_Args args{.struct_size = PJRT_Event_Destroy_Args_STRUCT_SIZE, .event = event};
  plugin->api().PJRT_Event_Destroy(&args);
}

// PJRT_Event_Await has no deadline, so the plugin is asked to call.
void Event::wait(Deadline deadline, const std::string& what, std::shared_ptr<const void> used,
                 const std::function<void()>& check) const {
  constexpr std::chrono::milliseconds kBetweenChecks(100);
  const auto& plugin = *event_.get_deleter().plugin;
  const auto notice = std::make_shared<Notice>(plugin, std::move(used));
  auto holder = std::make_unique<std::shared_ptr<Notice>>(notice);
  PJRT_Event_OnReady_Args args{.struct_size = PJRT_Event_OnReady_Args_STRUCT_SIZE,
                               .event = event_.get(),
                               .callback = &Notice::tell,
                               .user_arg = holder.get()};
  plugin.call(&PJRT_Api::PJRT_Event_OnReady, args, what);
  holder.release();
  std::optional<PJRT_Error*> error;
  while (!error) {
    const auto next = check ? std::min(deadline.time(), Deadline::Clock::now() + kBetweenChecks) : deadline.time();
    error = notice->wait(next);
    if (error) break;
    if (deadline.passed()) throw DeadlineExceeded(what, deadline.waited(), {}, kNoAnswer);
    if (check) check();
  }
  plugin.check(*error, what);
}

}  // namespace lockstep::pjrt
