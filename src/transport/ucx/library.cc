#include "transport/ucx/worker.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::transport::ucx {
namespace {

constexpr unsigned kMajor = 1, kMinor = 22;

template <class Function>
void find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr) throw InvalidArgument(text("the backend \"ucx\": UCX has no ", name));
}

// Loads UCX with settings that it reads from the environment alone. Without them UCX would handle SIGSEGV and similar
// signals, and print lost connections to stdout. It would patch mmap too, which only memory registered with RDMA
// devices needs. Values that the user has set stay.
void* open() {
  std::vector<const char*> set;
  const auto set_for_now = [&](const char* name, const char* value) {
    if (std::getenv(name) != nullptr) return;
    setenv(name, value, 1);
    set.push_back(name);
  };
  const bool has_rdma = !rdma_devices().empty();
  set_for_now("UCX_HANDLE_ERRORS", "none");
  set_for_now("UCX_LOG_LEVEL", "fatal");
  if (!has_rdma) set_for_now("UCX_MEM_EVENTS", "n");
  void* const handle = dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL);
  for (const char* const name : set) unsetenv(name);
  return handle;
}

Library load() {
  void* const handle = open();
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
  return found;
}

}  // namespace

std::vector<std::string> rdma_devices() {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& device : std::filesystem::directory_iterator("/sys/class/infiniband", error)) {
    names.push_back(device.path().filename());
  }
  return names;
}

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

}  // namespace lockstep::transport::ucx
