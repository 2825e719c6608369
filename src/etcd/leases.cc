#include "etcd/leases.h"

#include "base/log.h"
#include "base/stop.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::etcd {
namespace {

constexpr std::chrono::milliseconds kBetweenRenewals(kLeaseSeconds * 1000 / 4);

}  // namespace

Leases::Leases(Client& client) : client_(client), thread_([this](const std::stop_token& stop) { renew(stop); }) {}

void Leases::add(std::int64_t lease) {
  MutexLock lock(mutex_);
  leases_.insert(lease);
}

void Leases::remove(std::int64_t lease) {
  MutexLock lock(mutex_);
  leases_.erase(lease);
}

void Leases::renew(const std::stop_token& stop) {
  while (!stop_requested_by(Deadline::after(kBetweenRenewals), stop)) {
    std::set<std::int64_t> leases;
    {
      MutexLock lock(mutex_);
      leases = leases_;
    }
    for (const auto lease : leases) {
      try {
        if (client_.keep_alive(lease, Deadline::after(kBetweenRenewals))) continue;
        MutexLock lock(mutex_);
        if (leases_.erase(lease) == 0) continue;  // it was given up meanwhile
        log_warning("etcd did not hear from this process in time: the others of its job may take it for lost");
      } catch (const Error&) {  // the cluster does not answer: again next time
      }
    }
  }
}

}  // namespace lockstep::etcd
