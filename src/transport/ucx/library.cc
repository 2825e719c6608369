#include "transport/ucx/library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "base/text.h"
#include "lockstep/error.h"

namespace lockstep::ucx {
namespace {

constexpr unsigned kMajor = 1, kMinor = 22;

template <class Function>
void find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr) throw InvalidArgument(text("the backend \"ucx\": UCX has no ", name));
}

// Loaded, UCX handles SIGSEGV and its like, and prints lost connections to stdout, until it is told not to. What the
// user set himself stays.
void quieten(void* handle) {
  using SetOption = ucs_status_t(const char* name, const char* value);
  if (std::getenv("UCX_LOG_LEVEL") == nullptr) {
    const auto set = reinterpret_cast<SetOption*>(dlsym(handle, "ucs_global_opts_set_value"));
    if (set != nullptr) set("LOG_LEVEL", "fatal");
  }
  if (std::getenv("UCX_HANDLE_ERRORS") == nullptr) {
    const auto disable = reinterpret_cast<void (*)()>(dlsym(handle, "ucs_debug_disable_signals"));
    if (disable != nullptr) disable();
  }
}

Library load() {
  void* const handle = dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw InvalidArgument(text("the backend \"ucx\" needs UCX ", kMajor, ".", kMinor, " or newer: ", dlerror()));
  }
  Library found;
#define LOCKSTEP_UCX_FIND(name) find(handle, #name, found.name);
  LOCKSTEP_UCX_FUNCTIONS(LOCKSTEP_UCX_FIND)
#undef LOCKSTEP_UCX_FIND
  unsigned major = 0, minor = 0, release = 0;
  found.ucp_get_version(&major, &minor, &release);
  if (major < kMajor || (major == kMajor && minor < kMinor)) {
    throw InvalidArgument(text("the backend \"ucx\" needs UCX ", kMajor, ".", kMinor, " or newer; libucp.so.0 is ",
                               found.ucp_get_version_string()));
  }
  quieten(handle);
  return found;
}

}  // namespace

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

}  // namespace lockstep::ucx
