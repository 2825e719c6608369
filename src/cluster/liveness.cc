#include "cluster/liveness.h"

#include <chrono>

#include "lockstep/base/error.h"

namespace lockstep::cluster {
namespace {

constexpr std::chrono::seconds kToShow(10);  // with etcd also while it elects a leader

}  // namespace

std::shared_ptr<void> show_presence(const Store& store, const std::string& name) {
  return store.set_at_end(key_of_end(name), "reached", Deadline::after(kToShow));
}

std::string key_of_end(const std::string& name) { return "end of " + name; }

Liveness::Sign Liveness::look(const std::string& store, const std::string& name) {
  try {
    const auto end = stores_->compare_set(store, key_of_end(name), "", "");
    MutexLock lock(mutex_);
    silences_.erase(store);
    return end.empty() ? Sign::lives : Sign::ended;
  } catch (const Error&) {
    MutexLock lock(mutex_);
    auto& silence = silences_.try_emplace(store, Silence{stores_->now()}).first->second;
    const bool is_lost = ++silence.looks >= patience_.looks && stores_->now() - silence.since >= patience_.seconds;
    return is_lost ? Sign::lost : Sign::silent;
  }
}

}  // namespace lockstep::cluster
