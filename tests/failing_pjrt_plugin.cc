// The plugin for CPUs with faults, as FAULT says: "compile" (no program fits), "launch" (a device is lost when a
// program is launched), "run" (while it runs).
#include <dlfcn.h>
#include <pjrt_c_api.h>

#include <cstdlib>
#include <string_view>

namespace {

struct Fault {
  std::string_view message;
  PJRT_Error_Code code;
};
Fault does_not_fit{"Ran out of memory in memory space hbm. Used 17.25G of 15.75G hbm. Exceeded hbm capacity by 1.50G.",
                   PJRT_Error_Code_RESOURCE_EXHAUSTED};
Fault is_lost{"The device TPU_1 halted: the chip does not answer", PJRT_Error_Code_UNAVAILABLE};

bool is_ours(const PJRT_Error* error) {
  const auto* const fault = reinterpret_cast<const Fault*>(error);
  return fault == &does_not_fit || fault == &is_lost;
}

bool has(std::string_view fault) {
  const char* const asked = std::getenv("FAULT");
  return asked != nullptr && asked == fault;
}

PJRT_Error* error_of(Fault& fault) { return reinterpret_cast<PJRT_Error*>(&fault); }

const PJRT_Api& cpu() {
  static const PJRT_Api& api =
      *reinterpret_cast<const PJRT_Api* (*)()>(dlsym(dlopen(CPU_PLUGIN, RTLD_NOW | RTLD_LOCAL), "GetPjrtApi"))();
  return api;
}

// A caller to be told that work has failed once the work has ended: until then the work uses the caller's memory.
struct Waiting {
  void (*callback)(PJRT_Error*, void*);
  void* user;
};

void fail(PJRT_Error* error, void* waiting) {
  PJRT_Error_Destroy_Args args{.struct_size = PJRT_Error_Destroy_Args_STRUCT_SIZE, .error = error};
  if (error != nullptr) cpu().PJRT_Error_Destroy(&args);
  const auto [callback, user] = *static_cast<Waiting*>(waiting);
  delete static_cast<Waiting*>(waiting);
  callback(error_of(is_lost), user);
}

}  // namespace

extern "C" const PJRT_Api* GetPjrtApi() {
  static PJRT_Api api = cpu();
  api.PJRT_Error_Message = [](PJRT_Error_Message_Args* args) {
    if (!is_ours(args->error)) return cpu().PJRT_Error_Message(args);
    const auto message = reinterpret_cast<const Fault*>(args->error)->message;
    args->message = message.data();
    args->message_size = message.size();
  };
  api.PJRT_Error_GetCode = [](PJRT_Error_GetCode_Args* args) -> PJRT_Error* {
    if (!is_ours(args->error)) return cpu().PJRT_Error_GetCode(args);
    args->code = reinterpret_cast<const Fault*>(args->error)->code;
    return nullptr;
  };
  api.PJRT_Error_Destroy = [](PJRT_Error_Destroy_Args* args) {
    if (!is_ours(args->error)) cpu().PJRT_Error_Destroy(args);
  };
  api.PJRT_Client_Compile = [](PJRT_Client_Compile_Args* args) {
    return has("compile") ? error_of(does_not_fit) : cpu().PJRT_Client_Compile(args);
  };
  api.PJRT_LoadedExecutable_Execute = [](PJRT_LoadedExecutable_Execute_Args* args) {
    return has("launch") ? error_of(is_lost) : cpu().PJRT_LoadedExecutable_Execute(args);
  };
  api.PJRT_Executable_GetCompiledMemoryStats = nullptr;  // which plugins need not have
  api.PJRT_Event_OnReady = [](PJRT_Event_OnReady_Args* args) -> PJRT_Error* {
    if (!has("run")) return cpu().PJRT_Event_OnReady(args);
    auto* const waiting = new Waiting{args->callback, args->user_arg};
    auto when_ended = *args;
    when_ended.callback = fail;
    when_ended.user_arg = waiting;
    return cpu().PJRT_Event_OnReady(&when_ended);
  };
  return &api;
}
