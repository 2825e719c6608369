#include "base/plugin.h"

#include <dlfcn.h>

#include <filesystem>

#include "base/text.h"

namespace lockstep {
namespace {

std::filesystem::path folder_of_this_library() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&find_in_plugin), &info) == 0 || info.dli_fname == nullptr) return {};
  return std::filesystem::path(info.dli_fname).parent_path();
}

}  // namespace

void* find_in_plugin(const Plugin& plugin, const char* function, std::string& reason) {
  const auto library = text("liblockstep_", plugin.name, ".so");
  void* handle = dlopen((folder_of_this_library() / library).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* const found = handle == nullptr ? nullptr : dlsym(handle, function);
  if (found == nullptr) {
    reason = text(plugin.needed_for, " need ", library, ", which the target lockstep_", plugin.name,
                  " of a build with -D", plugin.option, "=ON makes: ", dlerror());
  }
  return found;
}

}  // namespace lockstep
