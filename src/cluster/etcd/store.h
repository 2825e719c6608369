// A job's Store in an etcd cluster.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cluster/etcd/client.h"
#include "cluster/store_backend.h"

namespace lockstep::etcd {

class EtcdStore final : public cluster::StoreBackend, public std::enable_shared_from_this<EtcdStore> {
 public:
  // As cluster::connect_to_etcd.
  static std::shared_ptr<EtcdStore> connect(const std::string& address, Deadline deadline, const Access& access);

  std::string address() const override { return address_; }
  const Access& access() const override { return access_; }
  std::string local_address(Deadline deadline) override;
  void set(const std::string& key, const std::string& value, Deadline deadline) override;
  std::vector<std::string> get(const std::vector<std::string>& keys, Deadline deadline) override;
  std::vector<std::string> missing(const std::vector<std::string>& keys, Deadline deadline) override;
  std::int64_t add(const std::string& key, std::int64_t difference, Deadline deadline) override;
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired,
                          Deadline deadline) override;
  std::shared_ptr<void> set_at_end(const std::string& key, const std::string& value, Deadline deadline) override;
  void fail_waiters(const std::string& prefix, const std::string& suffix, const std::string& reason,
                    Deadline deadline) override;
  void notice_end(int process, Deadline deadline) override;

  EtcdStore(std::string address, Access access);  // call `connect`

 private:
  struct Entries {
    std::vector<std::optional<std::string>> values;
    std::int64_t revision = 0;  // of the cluster, when they were read
  };

  void begin(Deadline deadline);
  TxnResponse txn(const TxnRequest& request, Deadline deadline);
  Entries read(const std::vector<std::string>& whole, Deadline deadline);
  Entries find(const std::vector<std::string>& keys, Deadline deadline);
  void require_no_failure(const std::vector<std::string>& missing, Deadline deadline);

  std::string value_of(const std::string& key) const { return root_ + "value/" + key; }
  std::string last_of(const std::string& key) const { return root_ + "last/" + key; }
  std::string life_of(const std::string& key) const { return root_ + "life/" + key; }
  std::string failures() const { return root_ + "failed/"; }
  std::string process(int number) const;

  const std::string address_, root_;
  const Access access_;
  Client client_;
  std::int64_t lease_ = 0;  // of the job's keys
  Leases leases_;           // last: its thread uses the client
};

}  // namespace lockstep::etcd
