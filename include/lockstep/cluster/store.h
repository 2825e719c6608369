// Store: keys and values by which processes find each other. Torch-free. Follows torch.distributed.TCPStore.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/transport/access.h"

namespace lockstep {

namespace cluster {
class StoreBackend;
}

// A shared handle; any thread. Keys and values have at most 1 MiB, all values of one call 4 MiB.
//
//   auto store = rank == 0 ? Store::hold("127.0.0.1:29511") : Store::connect("127.0.0.1:29511", deadline);
//
// Every call throws DeadlineExceeded at its deadline. It throws ClusterError, naming the address, when the store is
// gone or when something else, or a store of another version, answers.
//
// When the holder destroys its last handle, the store answers for up to a second more, until the other processes have
// disconnected. So they learn why something failed, and not only that the store is gone.
class Store {
 public:
  explicit Store(std::shared_ptr<cluster::StoreBackend> backend, std::string prefix = "")
      : backend_(std::move(backend)), prefix_(std::move(prefix)) {}

  // Holds the store in this process, until the last handle of this process ends. Port 0: one of the system's choosing.
  // The host is an address of this machine. Throws ClusterError when it cannot be had, or `access` does not allow it.
  static Store hold(const std::string& address, const Access& access = access_of_environment());

  // Retries until a store answers there: its holder may start later. Throws ClusterError where it has another token.
  //
  // "etcd://host:2379,host:2379,host:2379/job": keys of that job in an etcd cluster (version 3), whichever of its
  // members answer. The keys are removed ten minutes after the last process has ended. Throws InvalidArgument for
  // another form. The keys are as safe as the cluster: the token is only compared, and connections are not encrypted.
  static Store connect(const std::string& address, Deadline deadline, const Access& access = access_of_environment());

  std::string address() const;  // "host:port", or etcd's
  const Access& access() const;

  // Returns this store with `prefix` before every key. Follows torch.distributed.PrefixStore.
  Store prefixed(const std::string& prefix) const;
  Store without_prefix() const;
  const std::string& prefix() const { return prefix_; }
  cluster::StoreBackend& backend() const { return *backend_; }

  void set(const std::string& key, const std::string& value, Deadline deadline) const;

  // Waits until the key is there.
  std::string get(const std::string& key, Deadline deadline) const;

  // Waits until all are there. DeadlineExceeded lists, by their places in `keys`, those that are not.
  std::vector<std::string> get(const std::vector<std::string>& keys, Deadline deadline) const;

  // Adds to the number at `key` (0 where there is none) and returns the sum. ClusterError where there is no number, or
  // the sum does not fit.
  std::int64_t add(const std::string& key, std::int64_t difference, Deadline deadline) const;

  // Sets `key` to `desired` where its value is `expected`, or where it has none and `expected` is empty. Returns its
  // value then. With both empty the call only reads, and those that wait for the key go on waiting.
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired,
                          Deadline deadline) const;

  // Sets `key`, where it has no value, to `value` when the returned handle is destroyed, or this process ends or is cut
  // off. So others learn of the end at once, unless its host goes down; etcd uses a lease of six seconds. As MQTT's
  // last will.
  std::shared_ptr<void> set_at_end(const std::string& key, const std::string& value, Deadline deadline) const;

  // From now on, waiting for a missing key that begins with `prefix` and ends with `suffix` throws ClusterError with
  // the beginning of `reason`, 64 KiB at most. The first reason is kept. Does not throw where the store does not
  // answer.
  void fail_waiters(const std::string& prefix, const std::string& reason, Deadline deadline,
                    const std::string& suffix = "") const;

 private:
  std::string whole(const std::string& key) const;

  std::shared_ptr<cluster::StoreBackend> backend_;
  std::string prefix_;
};

}  // namespace lockstep
