// A PJRT plugin: a shared library that compiles programs and runs them on devices of one kind, such as libtpu.so
// (OpenXLA's PJRT C API, https://openxla.org/xla/pjrt).
#pragma once

#include <pjrt_c_api.h>

#include <string>

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

  // Throws DeviceError where `error`, which it frees, is not null.
  void check(PJRT_Error* error, const std::string& what) const;

 private:
  [[noreturn]] void lacks(const std::string& what) const;
  Plugin(std::string path, const PJRT_Api& api) : path_(std::move(path)), api_(api) {}

  std::string path_;
  const PJRT_Api& api_;
};

// The path of the plugin to load: `asked`, else what the environment's PJRT_PLUGIN_LIBRARY_PATH or TPU_LIBRARY_PATH (as
// for JAX) says, else "libtpu.so".
std::string plugin_path(const std::string& asked);

}  // namespace lockstep::pjrt
