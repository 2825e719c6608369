// Calls of an etcd cluster, version 3.
#pragma once

#include <grpcpp/channel.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "cluster/etcd/messages.pb.h"
#include "lockstep/base/deadline.h"

namespace lockstep::etcd {

struct Range {
  std::string key, end;  // `end`: after the last key; empty: the key alone
};
// All keys that begin with it.
Range prefix_range(const std::string& prefix);

// Calls whichever member of the cluster answers, again until the deadline, so that a call may be carried out more than
// once. Throws DeadlineExceeded with the last problem, and ClusterError where the cluster refuses the call. Any thread.
class Client {
 public:
  explicit Client(const std::vector<std::string>& endpoints);

  TxnResponse txn(const TxnRequest& request, Deadline deadline);
  std::int64_t grant(std::int64_t seconds, Deadline deadline);  // a lease
  void revoke(std::int64_t lease, Deadline deadline);           // also where there is none
  bool keep_alive(std::int64_t lease, Deadline deadline);       // false: there is none any more

  // Returns when one of the ranges has changed since the revision, and also without that: within two seconds, and at
  // the deadline.
  void wait_for_change(const std::vector<Range>& ranges, std::int64_t since, Deadline deadline);

  // The member that answered last, "host:port".
  std::string endpoint();

 private:
  std::size_t current();           // the member that is asked now
  void leave(std::size_t member);  // it does not answer
  void pause();                    // before another attempt
  template <class Attempt>
  void call(Deadline deadline, const Attempt& attempt);
  template <class Request, class Response>
  Response unary(const char* method, const Request& request, Deadline deadline);

  // [member]: its endpoint, and how it is reached. Constant.
  std::vector<std::pair<std::string, std::shared_ptr<grpc::Channel>>> channels_;
  Mutex mutex_;
  std::size_t current_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
};

// Leases that last while this process renews them.

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
