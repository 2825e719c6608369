// Libraries of ours that are loaded when they are first needed.
#pragma once

#include <string>

namespace lockstep {

// The library liblockstep_NAME.so, which lies beside this one.
struct Plugin {
  const char* name;
  const char* needed_for;  // for messages: "parameter servers"
  const char* option;      // of CMake, for a build to have the library
};

// Returns the library's function of that name. If there is none, returns null, and says why in `reason`.
void* find_in_plugin(const Plugin& plugin, const char* function, std::string& reason);

// Returns the library's function of that name. Throws Failure if there is none.
template <class Failure, class Function>
Function* function_of_plugin(const Plugin& plugin, const char* function) {
  std::string reason;
  if (void* const found = find_in_plugin(plugin, function, reason)) return reinterpret_cast<Function*>(found);
  throw Failure(reason);
}

}  // namespace lockstep
