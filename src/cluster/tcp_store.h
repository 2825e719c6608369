// A store that a process holds, over TCP.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/mutex.h"
#include "cluster/store_backend.h"
#include "cluster/store_server.h"

namespace lockstep::cluster {

class TcpStore final : public StoreBackend {
 public:
  // As Store's functions of these names.
  static std::shared_ptr<TcpStore> hold(const std::string& address, const Access& access);
  static std::shared_ptr<TcpStore> connect(const std::string& address, Deadline deadline, const Access& access);

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

 private:
  // `answers`: how many strings are to come back; -1: any number.
  std::vector<std::string> ask(std::uint32_t code, const std::vector<std::string>& items, Deadline deadline,
                               int answers = -1);
  struct Link {
    FileDescriptor socket;
    transport::Seal seal;
  };
  Link take_idle();  // closed where there is none
  Link open_link(Deadline deadline);

  std::optional<StoreServer> server_;  // where this process holds the store
  std::string address_;
  Access access_;
  Mutex mutex_;
  std::vector<Link> idle_ LOCKSTEP_GUARDED_BY(mutex_);  // connections without a request in flight
};

}  // namespace lockstep::cluster
