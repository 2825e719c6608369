// A PJRT plugin: a shared library that compiles programs and runs them on devices of one kind, such as libtpu.so
// (OpenXLA's PJRT C API, https://openxla.org/xla/pjrt).
#pragma once

#include <pjrt_c_api.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep::pjrt {

// Loaded once, and never unloaded: plugins have threads of their own. Any thread may call.
class Plugin {
 public:
  // `path`: of the library; a name without a slash is searched for as dlopen does. One path gives one Plugin. Throws
  // DeviceError where there is no such library, it is no plugin, or it does not have the API of our header.
  static const Plugin& load(const std::string& path);

  const std::string& path() const { return path_; }
  const PJRT_Api& api() const { return api_; }

  // Calls a function of the API. Throws DeviceError with `what`, and the plugin's own text, where it fails.
  template <class Args>
  void call(PJRT_Error* (*PJRT_Api::*function)(Args*), Args& args, const std::string& what) const {
    if (api_.*function == nullptr) lacks(what);
    check((api_.*function)(&args), what);
  }

  void free(PJRT_Error* error) const;  // which may be null

  // Ends an object of the plugin by its function, such as &PJRT_Api::PJRT_Event_Destroy.
  template <class Args, class Object>
  void destroy(PJRT_Error* (*PJRT_Api::*function)(Args*), Object* object) const {
    Args args{sizeof args, nullptr, object};
    (api_.*function)(&args);
  }

  // Throws DeviceError where `error`, which it frees, is not null.
  void check(PJRT_Error* error, const std::string& what) const;

 private:
  [[noreturn]] void lacks(const std::string& what) const;
  Plugin(std::string path, const PJRT_Api& api) : path_(std::move(path)), api_(api) {}

  std::string path_;
  const PJRT_Api& api_;
};

// Ends an object of a plugin by the plugin's function, and keeps the plugin, or the client, that the object is of.
template <auto function, class Keeper = const Plugin*>
struct Destroy {
  Keeper keeper;

  const Plugin& plugin() const {
    if constexpr (std::is_pointer_v<Keeper>) {
      return *keeper;
    } else {
      return keeper->plugin();
    }
  }
  template <class Object>
  void operator()(Object* object) const {
    plugin().destroy(function, object);
  }
};

// The path of the plugin to load: `asked`, else what the environment's PJRT_PLUGIN_LIBRARY_PATH or TPU_LIBRARY_PATH (as
// for JAX) says, else "libtpu.so".
std::string plugin_path(const std::string& asked);

// Work that a plugin does in the background.

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
  std::unique_ptr<PJRT_Event, Destroy<&PJRT_Api::PJRT_Event_Destroy>> event_;
};

}  // namespace lockstep::pjrt
