#include "base/plugin.h"

#include <dlfcn.h>

#include <filesystem>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

constexpr const char* kLibrary = "liblockstep_grpc.so";

std::filesystem::path folder_of_this_library() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&function_of_grpc_plugin), &info) == 0 || info.dli_fname == nullptr)
    return {};
  return std::filesystem::path(info.dli_fname).parent_path();
}

}  // namespace

void* function_of_grpc_plugin(const char* function, const std::string& needs) {
  void* handle = dlopen((folder_of_this_library() / kLibrary).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  void* const found = handle == nullptr ? nullptr : dlsym(handle, function);
  if (found != nullptr) return found;
  throw ClusterError(text(needs, " need ", kLibrary, ", which a build with -DLOCKSTEP_GRPC=ON has: ", dlerror()));
}

}  // namespace lockstep
