// Work that a plugin does in the background.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "pjrt/plugin.h"

namespace lockstep::pjrt {

// The end of the text of a DeadlineExceeded of waiting for devices.
inline constexpr const char* kNoAnswer = ": the device has not answered";

// Moves. The work goes on when the Event is gone. One thread at a time waits.
class Event {
 public:
  Event(const Plugin& plugin, PJRT_Event* event);  // frees `event`

  // Throws DeviceError with `what`, and the plugin's text, where the work failed; and DeadlineExceeded where it has not
  // ended by then. `used`: what the work uses, which is kept until it ends, also after that.
  void wait(Deadline deadline, const std::string& what, std::shared_ptr<const void> used = nullptr) const;

  // Waits for work on several devices, which may wait for each other. Where one has failed, the others have the time
  // `after_failure` to end. Throws the first failure as `wait` does, and DeadlineExceeded where none has failed. Also
  // throws what `check` throws, which is called about ten times a second until there is a failure.
  static void wait_for_all(const std::vector<Event>& events, Deadline deadline,
                           std::chrono::duration<double> after_failure, const std::string& what,
                           const std::function<void()>& check = {});

  // True where the work has ended, as far as the plugin tells.
  bool has_ended() const noexcept;

 private:
  struct Free {
    const Plugin* plugin;
    void operator()(PJRT_Event* event) const;
  };
  std::unique_ptr<PJRT_Event, Free> event_;
};

}  // namespace lockstep::pjrt
