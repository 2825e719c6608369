#include "tpu/pjrt/plugin.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <utility>

#include "base/mutex.h"
#include "base/text.h"
#include "lockstep/base/device_error.h"
#include "lockstep/base/error.h"

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

  // Waits until all work has ended, or it is `time`; or, unless `failed`, some has failed. Returns true where all has
  // ended.
  bool wait(Deadline::Clock::time_point time, bool failed = true) {
    const MutexLock lock(mutex_);
    while (count_ > 0 && (failed || errors_.empty())) {
      if (changed_.wait_until(mutex_, time) == std::cv_status::timeout) break;
    }
    return count_ == 0;
  }

  bool any_failed() {
    const MutexLock lock(mutex_);
    return !errors_.empty();
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

void Event::wait(Deadline deadline, const std::string& what, std::shared_ptr<const void> used) const {
  const auto& plugin = event_.get_deleter().plugin();
  const auto unfinished = std::make_shared<Unfinished>(plugin, std::move(used));
  Unfinished::add(unfinished, event_.get(), what);
  if (!unfinished->wait(deadline.time())) throw DeadlineExceeded(what, deadline.waited(), {}, kNoAnswer);
  plugin.check(unfinished->take_error(), what);
}

void Event::wait_for_all(const std::vector<Event>& events, Deadline deadline,
                         std::chrono::duration<double> after_failure, const std::string& what,
                         const std::function<void()>& check) {
  if (events.empty()) return;
  constexpr std::chrono::milliseconds kBetweenChecks(100);
  const auto& plugin = events[0].event_.get_deleter().plugin();
  const auto unfinished = std::make_shared<Unfinished>(plugin, nullptr);
  for (const auto& event : events) Unfinished::add(unfinished, event.event_.get(), what);
  const auto end = deadline.time();
  bool all_ended = false, is_over = false;
  do {
    all_ended =
        unfinished->wait(check ? std::min(end, Deadline::Clock::now() + kBetweenChecks) : end, /*failed=*/false);
    is_over = all_ended || unfinished->any_failed();
    if (check && !is_over) check();
  } while (!is_over && Deadline::Clock::now() < end);
  if (unfinished->any_failed()) all_ended = unfinished->wait(std::min(end, Deadline::after(after_failure).time()));
  plugin.check(unfinished->take_error(), what);
  if (!all_ended) throw DeadlineExceeded(what, deadline.waited(), {}, kNoAnswer);
}

bool Event::has_ended() const noexcept {
  const auto& plugin = event_.get_deleter().plugin();
  PJRT_Event_IsReady_Args args{.struct_size = PJRT_Event_IsReady_Args_STRUCT_SIZE, .event = event_.get()};
  if (plugin.api().PJRT_Event_IsReady == nullptr) return false;
  if (auto* const error = plugin.api().PJRT_Event_IsReady(&args)) {
    plugin.free(error);
    return false;
  }
  return args.is_ready;
}

}  // namespace lockstep::pjrt
