// A shared library that looks like a PJRT plugin: of version FAKE_MAJOR of the API, and whose work never ends.
#include <pjrt_c_api.h>

extern "C" const PJRT_Api* GetPjrtApi() {
  static PJRT_Api api{.struct_size = PJRT_Api_STRUCT_SIZE,
                      .pjrt_api_version = {.struct_size = PJRT_Api_Version_STRUCT_SIZE, .major_version = FAKE_MAJOR}};
  api.PJRT_Plugin_Initialize = [](PJRT_Plugin_Initialize_Args*) -> PJRT_Error* { return nullptr; };
  [[maybe_unused]] static void* volatile caller = nullptr;  // who is never called
  api.PJRT_Event_OnReady = [](PJRT_Event_OnReady_Args* args) -> PJRT_Error* {
    caller = args->user_arg;
    return nullptr;
  };
  api.PJRT_Event_Destroy = [](PJRT_Event_Destroy_Args*) -> PJRT_Error* { return nullptr; };
  return &api;
}
