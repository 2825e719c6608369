// Access to the implementations behind public handles, for the library's own sources.
#pragma once

#include "lockstep/strategy/replicated.h"
#include "lockstep/strategy/strategy.h"

namespace lockstep {

struct internal::Unwrap {
  template <class Handle>
  static const auto& pointer(const Handle& handle) {
    return handle.impl_;
  }
};

// StrategyImpl of a Strategy, ModelImpl of a Model, ReplicatedParameters of a ReplicatedModule, GradientPath of a
// ReplicatedOptimizer.
template <class Handle>
auto& unwrap(const Handle& handle) {
  return *internal::Unwrap::pointer(handle);
}

}  // namespace lockstep
