// The interface under a Store: a store over TCP (store_server.h), or etcd.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/transport/access.h"

namespace lockstep::cluster {

// The calls of Store, with whole keys. Any thread.
class StoreBackend {
 public:
  virtual ~StoreBackend() = default;

  virtual std::string address() const = 0;
  virtual const Access& access() const = 0;

  // An address of this machine from which it reaches the store. Numeric.
  virtual std::string local_address(Deadline deadline) = 0;

  virtual void set(const std::string& key, const std::string& value, Deadline deadline) = 0;
  // Waits for all. DeadlineExceeded need not say which are missing.
  virtual std::vector<std::string> get(const std::vector<std::string>& keys, Deadline deadline) = 0;
  virtual std::vector<std::string> missing(const std::vector<std::string>& keys, Deadline deadline) = 0;
  virtual std::int64_t add(const std::string& key, std::int64_t difference, Deadline deadline) = 0;
  virtual std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired,
                                  Deadline deadline) = 0;
  virtual std::shared_ptr<void> set_at_end(const std::string& key, const std::string& value, Deadline deadline) = 0;
  virtual void fail_waiters(const std::string& prefix, const std::string& suffix, const std::string& reason,
                            Deadline deadline) = 0;

  // A process of this host has ended, which whoever started it knows.
  virtual void notice_end(int /*process*/, Deadline /*deadline*/) {}
};

// "etcd://host:port,host:port/job": the members of an etcd cluster, and a name that this job alone has there.
struct EtcdAddress {
  std::vector<std::string> endpoints;  // "host:port"
  std::string job;
};
inline constexpr const char* kEtcdScheme = "etcd://";
bool is_etcd(const std::string& address);
// Throws InvalidArgument naming the address and what is wrong with it.
EtcdAddress parse_etcd(const std::string& address);

// Connects through liblockstep_grpc.so. Throws ClusterError where the library is absent, the cluster does not answer by
// the deadline, or the job has another token.
std::shared_ptr<StoreBackend> connect_to_etcd(const std::string& address, Deadline deadline, const Access& access);

}  // namespace lockstep::cluster
