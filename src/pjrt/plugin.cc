#include "pjrt/plugin.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <memory>

#include "base/mutex.h"
#include "base/text.h"
#include "lockstep/base/device_error.h"

namespace lockstep::pjrt {
namespace {

constexpr const char* kHowToGetOne =
    "on a Cloud TPU VM, `pip install libtpu` and set PJRT_PLUGIN_LIBRARY_PATH to the libtpu.so that it installs; for "
    "other devices, to theirs";

// The API's size up to its last function that is called here; what newer headers have after it is not used.
constexpr std::size_t kLeastApiSize = PJRT_STRUCT_SIZE(PJRT_Api, PJRT_Executable_GetCompiledMemoryStats);

const PJRT_Api& api_of(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const std::string reason = dlerror();
    if (path.find('/') != std::string::npos && access(path.c_str(), F_OK) == 0)
      throw DeviceError(text(path, " cannot be loaded as a PJRT plugin: ", reason));
    throw DeviceError(text("there is no PJRT plugin ", path, ": ", reason, "; ", kHowToGetOne));
  }
  const auto get = reinterpret_cast<const PJRT_Api* (*)()>(dlsym(library, "GetPjrtApi"));
  if (get == nullptr) throw DeviceError(text(path, " is no PJRT plugin: it has no function GetPjrtApi"));
  const auto* const api = get();
  if (api == nullptr) throw DeviceError(text(path, ": GetPjrtApi returned nothing"));
  const auto& version = api->pjrt_api_version;
  if (version.major_version != PJRT_API_MAJOR || api->struct_size < kLeastApiSize)
    throw DeviceError(text(path, " has version ", version.major_version, ".", version.minor_version,
                           " of the PJRT API; this build needs ", PJRT_API_MAJOR, ".", PJRT_API_MINOR,
                           ", or a version near it"));
  return *api;
}

constexpr std::array<const char*, 17> kCodes{
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};

std::string describe(const PJRT_Api& api, PJRT_Error* error) {
  PJRT_Error_Message_Args message{.struct_size = PJRT_Error_Message_Args_STRUCT_SIZE, .error = error};
  api.PJRT_Error_Message(&message);
  PJRT_Error_GetCode_Args code{.struct_size = PJRT_Error_GetCode_Args_STRUCT_SIZE, .error = error};
  const bool known = api.PJRT_Error_GetCode(&code) == nullptr && static_cast<std::size_t>(code.code) < kCodes.size();
  std::string said(message.message, message.message_size);
  while (!said.empty() && said.back() == '\n') said.pop_back();
  std::replace(said.begin(), said.end(), '\n', ' ');
  return text(said, " (", known ? kCodes[static_cast<std::size_t>(code.code)] : "an unknown error", ")");
}

// True where the kernel shows a TPU's chips, which are /dev/accel0 or /dev/vfio/0.
bool shows_a_tpu() {
  for (const char* const path : {"/dev/accel0", "/dev/vfio/0"})
    if (access(path, F_OK) == 0) return true;
  return false;
}

}  // namespace

const Plugin& Plugin::load(const std::string& path) {
  static Mutex mutex;
  static auto& loaded = *new std::map<std::string, std::unique_ptr<const Plugin>>;  // used until the process's end
  const MutexLock lock(mutex);
  auto& plugin = loaded[path];
  if (!plugin) {
    // Without a TPU libtpu asks Google's metadata server for one, for many minutes, unless it is told not to.
    if (!shows_a_tpu()) setenv("TPU_SKIP_MDS_QUERY", "1", 0);
    std::unique_ptr<const Plugin> made(new Plugin(path, api_of(path)));
    PJRT_Plugin_Initialize_Args args{.struct_size = PJRT_Plugin_Initialize_Args_STRUCT_SIZE};
    made->call(&PJRT_Api::PJRT_Plugin_Initialize, args, text(path, ": the plugin cannot begin"));
    plugin = std::move(made);
  }
  return *plugin;
}

void Plugin::lacks(const std::string& what) const {
  throw DeviceError(text(what, ": ", path_, " has no function for that"));
}

void Plugin::free(PJRT_Error* error) const {
  PJRT_Error_Destroy_Args args{.struct_size = PJRT_Error_Destroy_Args_STRUCT_SIZE, .error = error};
  if (error != nullptr) api_.PJRT_Error_Destroy(&args);
}

void Plugin::check(PJRT_Error* error, const std::string& what) const {
  if (error == nullptr) return;
  const auto said = describe(api_, error);
  free(error);
  throw DeviceError(text(what, ": ", said));
}

std::string plugin_path(const std::string& asked) {
  if (!asked.empty()) return asked;
  for (const char* const name : {"PJRT_PLUGIN_LIBRARY_PATH", "TPU_LIBRARY_PATH"}) {
    const char* const value = std::getenv(name);
    if (value != nullptr && *value != '\0') return value;
  }
  return "libtpu.so";
}

}  // namespace lockstep::pjrt
