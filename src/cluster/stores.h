// The stores of a job's hosts, by their addresses. Each host's launcher holds one.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "lockstep/cluster/store.h"

namespace lockstep::cluster {

class Stores {
 public:
  virtual ~Stores() = default;

  // Does what Store::compare_set does. Throws Error where that store does not answer soon.
  virtual std::string compare_set(const std::string& store, const std::string& key, const std::string& expected,
                                  const std::string& desired) = 0;

  // Returns the values that are there, once all are or the deadline has passed. Throws Error where no answer comes.
  virtual std::vector<std::optional<std::string>> get(const std::string& store, const std::vector<std::string>& keys,
                                                      Deadline deadline) = 0;

  // Returns the clock by which `get` waits, in seconds; and whether a deadline has passed on this clock.
  virtual double now() const = 0;
  virtual bool passed(Deadline deadline) const = 0;

  // Calls ask(i) for each i below `count`, at once where it can: a host that is lost answers late. ask() must not
  // throw.
  virtual void for_each(std::size_t count, const std::function<void(std::size_t)>& ask) {
    for (std::size_t i = 0; i < count; ++i) ask(i);
  }

  // Waits for a random time.
  virtual void pause(double longest_seconds) = 0;

  // Returns a number above `seen` that this process has not got before.
  int next_round(int seen) {
    MutexLock lock(rounds_mutex_);
    return rounds_ = std::max(rounds_, seen) + 1;
  }

 private:
  Mutex rounds_mutex_;
  int rounds_ LOCKSTEP_GUARDED_BY(rounds_mutex_) = 0;
};

// Stores over TCP, or the one in etcd, which is every host's. Any thread.
class ConnectedStores final : public Stores {
 public:
  // `here`: the store of this process's host.
  explicit ConnectedStores(Store here);

  std::string compare_set(const std::string& store, const std::string& key, const std::string& expected,
                          const std::string& desired) override;
  std::vector<std::optional<std::string>> get(const std::string& store, const std::vector<std::string>& keys,
                                              Deadline deadline) override;
  double now() const override;
  bool passed(Deadline deadline) const override { return deadline.passed(); }
  void pause(double longest_seconds) override;
  void for_each(std::size_t count, const std::function<void(std::size_t)>& ask) override;

  const Store& here() const { return here_; }

  // Returns the store at the address. Throws Error where it does not answer soon.
  Store at(const std::string& address);

 private:
  void forget(const std::string& address);

  struct Place {
    std::optional<Store> store;
    std::chrono::steady_clock::time_point silent_until;  // it is not asked again before
  };
  const Store here_;
  Mutex mutex_;
  std::map<std::string, Place> places_ LOCKSTEP_GUARDED_BY(mutex_);  // [address]
};

}  // namespace lockstep::cluster
