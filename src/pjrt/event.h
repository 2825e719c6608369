// Work that a plugin does in the background.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "lockstep/base/deadline.h"
#include "pjrt/plugin.h"

namespace lockstep::pjrt {

// What a DeadlineExceeded of waiting for devices says beside.
inline constexpr const char* kNoAnswer = ": the device has not answered";

// Moves. The work goes on when the Event is gone. One thread at a time waits.
class Event {
 public:
  Event(const Plugin& plugin, PJRT_Event* event);  // frees `event`

  // Throws DeviceError with `what`, and the plugin's text, where the work failed; DeadlineExceeded where it has not
  // ended by then; and what `check` throws, which is called about ten times a second. `used`: what the work uses, which
  // is kept until it ends, also after that.
  void wait(Deadline deadline, const std::string& what, std::shared_ptr<const void> used = nullptr,
            const std::function<void()>& check = {}) const;

 private:
  struct Free {
    const Plugin* plugin;
    void operator()(PJRT_Event* event) const;
  };
  std::unique_ptr<PJRT_Event, Free> event_;
};

}  // namespace lockstep::pjrt
