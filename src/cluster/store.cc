#include "lockstep/cluster/store.h"

#include <algorithm>
#include <sstream>

#include "base/process.h"
#include "base/text.h"
#include "cluster/resolvers.h"
#include "cluster/store_backend.h"
#include "cluster/tcp_store.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

constexpr std::size_t kLongestItem = 1 << 20, kLongestReason = 1 << 16;
// Extra time after a call's deadline in which the store may say which keys are missing.
constexpr std::chrono::seconds kExtraForMissingKeys(1);

void check_length(const std::string& item) {
  if (item.size() <= kLongestItem) return;
  throw InvalidArgument(text("store: a key or value of ", item.size(), " bytes; at most ", kLongestItem));
}

}  // namespace

Store Store::hold(const std::string& address, const Access& access) {
  return Store(cluster::TcpStore::hold(address, access));
}

Store Store::connect(const std::string& address, Deadline deadline, const Access& access) {
  if (cluster::is_etcd(address)) return Store(cluster::connect_to_etcd(address, deadline, access));
  return Store(cluster::TcpStore::connect(address, deadline, access));
}

std::string Store::address() const { return backend_->address(); }
const Access& Store::access() const { return backend_->access(); }
Store Store::prefixed(const std::string& prefix) const { return Store(backend_, prefix_ + prefix); }
Store Store::without_prefix() const { return Store(backend_); }

void Store::set(const std::string& key, const std::string& value, Deadline deadline) const {
  check_length(value);
  backend_->set(whole(key), value, deadline);
}

std::string Store::get(const std::string& key, Deadline deadline) const { return get(std::vector{key}, deadline)[0]; }

std::int64_t Store::add(const std::string& key, std::int64_t difference, Deadline deadline) const {
  return backend_->add(whole(key), difference, deadline);
}

std::string Store::compare_set(const std::string& key, const std::string& expected, const std::string& desired,
                               Deadline deadline) const {
  for (const auto& item : {expected, desired}) check_length(item);
  return backend_->compare_set(whole(key), expected, desired, deadline);
}

std::shared_ptr<void> Store::set_at_end(const std::string& key, const std::string& value, Deadline deadline) const {
  check_length(value);
  return backend_->set_at_end(whole(key), value, deadline);
}

void Store::fail_waiters(const std::string& prefix, const std::string& reason, Deadline deadline,
                         const std::string& suffix) const {
  const auto key = whole(prefix);
  try {
    backend_->fail_waiters(key, suffix, reason.substr(0, kLongestReason), deadline);
  } catch (const Error&) {  // nobody waits there
  }
}

std::vector<std::string> Store::get(const std::vector<std::string>& keys, Deadline deadline) const {
  if (keys.empty()) return {};
  std::vector<std::string> all;
  for (const auto& key : keys) all.push_back(whole(key));
  try {
    return backend_->get(all, deadline);
  } catch (const DeadlineExceeded&) {
    const auto missing = backend_->missing(all, Deadline::after(kExtraForMissingKeys));
    std::vector<int> places;
    for (const auto& key : missing) {
      places.push_back(static_cast<int>(std::find(all.begin(), all.end(), key) - all.begin()));
    }
    throw DeadlineExceeded("store", deadline.waited(), places,
                           text(" (missing in ", address(), ": ", join(missing), ")"));
  }
}

std::string Store::whole(const std::string& key) const {
  check_length(key);
  return prefix_ + key;
}

namespace cluster {

bool is_etcd(const std::string& address) { return address.starts_with(kEtcdScheme); }

EtcdAddress parse_etcd(const std::string& address) {
  const auto fail = [&](const std::string& why) {
    throw InvalidArgument(
        text("the store is \"", address, "\", ", why, "; it must be as etcd://host:2379,host:2379/name-of-the-job"));
  };
  const std::string scheme = kEtcdScheme;
  if (!is_etcd(address)) fail("without etcd://");
  const auto rest = address.substr(scheme.size());
  const auto slash = rest.find('/');
  EtcdAddress parsed;
  std::istringstream endpoints(rest.substr(0, slash));
  for (std::string endpoint; std::getline(endpoints, endpoint, ',');) {
    parsed.endpoints.push_back(endpoint);
    if (!is_host_and_port(endpoint)) fail(text("of which \"", endpoint, "\" is no host and port"));
  }
  if (parsed.endpoints.empty()) fail("without a host");
  if (slash != std::string::npos) parsed.job = rest.substr(slash + 1);
  if (parsed.job.empty()) fail("without the job's name");
  if (parsed.job.find_first_of("/ ,") != std::string::npos) fail("whose job's name has a slash, a comma or a space");
  return parsed;
}

std::shared_ptr<StoreBackend> connect_to_etcd(const std::string& address, Deadline deadline, const Access& access) {
  parse_etcd(address);
  using Function = void(std::shared_ptr<StoreBackend>&, const std::string&, Deadline, const Access&);
  static const auto connect = function_of_plugin<ClusterError, Function>({"grpc", "stores of etcd", "LOCKSTEP_GRPC"},
                                                                         "lockstep_connect_to_etcd");
  std::shared_ptr<StoreBackend> store;
  connect(store, address, deadline, access);
  return store;
}

}  // namespace cluster
}  // namespace lockstep
