// Named places where a test makes something go wrong: the wrapper that injects faults sets the calling thread's hook.
#pragma once

#include <functional>

namespace lockstep {

using FailHook = std::function<void(const char* place)>;

inline thread_local FailHook* fail_hook = nullptr;

inline void fail_point(const char* place) {
  if (fail_hook != nullptr) [[unlikely]]
    (*fail_hook)(place);
}

}  // namespace lockstep
