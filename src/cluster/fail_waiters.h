// Fails the waits of others in a store that may be gone.
#pragma once

#include <string>

#include "lockstep/base/error.h"
#include "lockstep/cluster/store.h"

namespace lockstep::cluster {

// Store::fail_waiters, with the beginning of a long reason. Does nothing where the store is gone: nobody waits there.
inline void fail_waiters(const Store& store, const std::string& prefix, const std::string& reason, Deadline deadline) {
  constexpr std::size_t kLongest = 1 << 16;
  try {
    store.fail_waiters(prefix, reason.substr(0, kLongest), deadline);
  } catch (const Error&) {
  }
}

}  // namespace lockstep::cluster
