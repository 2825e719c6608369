#include "transport/ucx/worker.h"

#include <array>
#include <cstdlib>
#include <filesystem>
#include <optional>

#include "base/process.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::transport::ucx {
namespace {

constexpr unsigned kMajor = 1, kMinor = 22;

// A value of a variable that the user has not set, while it lives.
class DefaultInEnvironment {
 public:
  DefaultInEnvironment(const char* name, const char* value) : name_(std::getenv(name) == nullptr ? name : nullptr) {
    if (name_ != nullptr) setenv(name_, value, 1);
  }
  ~DefaultInEnvironment() {
    if (name_ != nullptr) unsetenv(name_);
  }
  DefaultInEnvironment(const DefaultInEnvironment&) = delete;
  DefaultInEnvironment& operator=(const DefaultInEnvironment&) = delete;

 private:
  const char* const name_;
};

// Loads UCX with settings that it reads from the environment alone. Without them UCX would handle SIGSEGV and similar
// signals, and print lost connections to stdout. It would patch mmap too, which only memory registered with RDMA
// devices needs. Values that the user has set stay.
OpenedLibrary open() {
  constexpr std::array kNames{"libucp.so.0"};
  const DefaultInEnvironment handle_errors("UCX_HANDLE_ERRORS", "none"), log_level("UCX_LOG_LEVEL", "fatal");
  std::optional<DefaultInEnvironment> memory_events;
  if (rdma_devices().empty()) memory_events.emplace("UCX_MEM_EVENTS", "n");
  return {"UCX", kNames, text("the backend \"ucx\" needs UCX ", kMajor, ".", kMinor, " or newer")};
}

Library load() {
  const auto opened = open();
  Library found;
#define LOCKSTEP_UCX_FIND(name) opened.find(#name, found.name);
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
