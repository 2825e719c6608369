// Loads liblockstep_grpc.so, which lies beside this library: a program without parameter servers needs no gRPC.
#include <dlfcn.h>

#include <filesystem>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "parameter_server/service.h"

namespace lockstep::parameter_server {
namespace {

constexpr const char* kLibrary = "liblockstep_grpc.so";
constexpr const char* kFunction = "lockstep_grpc_engine";

std::filesystem::path folder_of_this_library() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&service_engine), &info) == 0 || info.dli_fname == nullptr) return {};
  return std::filesystem::path(info.dli_fname).parent_path();
}

const ServiceEngine* load() {
  void* handle = dlopen((folder_of_this_library() / kLibrary).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  using Function = const ServiceEngine* (*)();
  const auto function = handle == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(handle, kFunction));
  if (function != nullptr) return function();
  throw ClusterError(
      text("parameter servers need ", kLibrary, ", which a build with -DLOCKSTEP_GRPC=ON has: ", dlerror()));
}

}  // namespace

const ServiceEngine& service_engine() {
  static const ServiceEngine* const engine = load();
  return *engine;
}

}  // namespace lockstep::parameter_server
