// A shared library that looks like a PJRT plugin: of version FAKE_MAJOR of the API. It never opens its devices, and its
// work never ends, but for that of events which are not null: it has failed.
#include <pjrt_c_api.h>
#include <unistd.h>

#include <string_view>
#include <vector>

namespace {

constexpr std::string_view kMessage = "the chip halted";
int failure = 0;  // whose address is that of the error

}  // namespace

extern "C" const PJRT_Api* GetPjrtApi() {
  static PJRT_Api api{.struct_size = PJRT_Api_STRUCT_SIZE,
                      .pjrt_api_version = {.struct_size = PJRT_Api_Version_STRUCT_SIZE, .major_version = FAKE_MAJOR}};
  api.PJRT_Plugin_Initialize = [](PJRT_Plugin_Initialize_Args*) -> PJRT_Error* { return nullptr; };
  api.PJRT_Client_Create = [](PJRT_Client_Create_Args*) -> PJRT_Error* {
    while (true) pause();
  };
  static auto& callers = *new std::vector<void*>;  // who are never called
  api.PJRT_Event_OnReady = [](PJRT_Event_OnReady_Args* args) -> PJRT_Error* {
    if (args->event == nullptr)
      callers.push_back(args->user_arg);
    else
      args->callback(reinterpret_cast<PJRT_Error*>(&failure), args->user_arg);
    return nullptr;
  };
  api.PJRT_Event_IsReady = [](PJRT_Event_IsReady_Args* args) -> PJRT_Error* {
    args->is_ready = args->event != nullptr;
    return nullptr;
  };
  api.PJRT_Error_Message = [](PJRT_Error_Message_Args* args) {
    args->message = kMessage.data();
    args->message_size = kMessage.size();
  };
  api.PJRT_Error_GetCode = [](PJRT_Error_GetCode_Args* args) -> PJRT_Error* {
    args->code = PJRT_Error_Code_UNAVAILABLE;
    return nullptr;
  };
  api.PJRT_Error_Destroy = [](PJRT_Error_Destroy_Args*) {};
  api.PJRT_Event_Destroy = [](PJRT_Event_Destroy_Args*) -> PJRT_Error* { return nullptr; };
  return &api;
}
