// Leases that last while this process renews them.
#pragma once

#include <cstdint>
#include <set>
#include <thread>

#include "base/mutex.h"
#include "etcd/client.h"

namespace lockstep::etcd {

// A process that has been silent for so long has ended for the others.
inline constexpr std::int64_t kLeaseSeconds = 6;

// Any thread.
class Leases {
 public:
  explicit Leases(Client& client);

  void add(std::int64_t lease);
  void remove(std::int64_t lease);

 private:
  void renew(const std::stop_token& stop);

  Client& client_;
  Mutex mutex_;
  std::set<std::int64_t> leases_ LOCKSTEP_GUARDED_BY(mutex_);
  std::jthread thread_;
};

}  // namespace lockstep::etcd
