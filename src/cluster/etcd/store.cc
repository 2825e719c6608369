// A key K of a Store is, in the cluster, "/lockstep/JOB/value/K". A job also has "last/K": the value that set_at_end
// leaves, and "life/K", with the lease of the process. Whoever looks for K, and finds the first without the second,
// sets K. "failed/" with a packed prefix and suffix says why nobody waits for such keys. "process/SPACE/NUMBER/LEASE"
// are the leases of a process. "added/": the outcome of a call of add, which may be made twice. "token": a digest.
#include "cluster/etcd/store.h"

#include <sodium.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <utility>

#include "base/text.h"
#include "cluster/resolvers.h"
#include "cluster/store_texts.h"
#include "lockstep/base/error.h"
#include "transport/connections.h"
#include "transport/socket.h"

namespace lockstep::etcd {
namespace {

constexpr std::int64_t kJobLeaseSeconds = 600;  // after the last process has ended
constexpr std::size_t kMostOperations = 100;    // of one transaction; etcd allows 128
constexpr std::chrono::seconds kToEnd(1);

void add_range(google::protobuf::RepeatedPtrField<RequestOp>& operations, const Range& range) {
  auto& added = *operations.Add()->mutable_request_range();
  added.set_key(range.key);
  added.set_range_end(range.end);
}

void add_put(google::protobuf::RepeatedPtrField<RequestOp>& operations, const std::string& key,
             const std::string& value, std::int64_t lease) {
  auto& added = *operations.Add()->mutable_request_put();
  added.set_key(key);
  added.set_value(value);
  added.set_lease(lease);
}

// The condition that there is no such key.
void require_none(TxnRequest& request, const std::string& key) {
  auto& compare = *request.add_compare();
  compare.set_target(Compare::VERSION);
  compare.set_key(key);
  compare.set_version(0);
}

std::optional<std::string> value_in(const TxnResponse& response, int operation) {
  const auto& found = response.responses(operation).response_range();
  return found.kvs_size() == 0 ? std::nullopt : std::optional(found.kvs(0).value());
}

// The space of processes' numbers, for containers of one machine may have one name.
std::string space_of_processes() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::error_code none;
  return text(boot, " ", std::filesystem::read_symlink("/proc/self/ns/pid", none).string());
}

std::string digest_of(const std::string& token, const std::string& job) {
  if (token.empty()) return "none";
  std::string digest(crypto_generichash_BYTES, '\0');
  const auto bytes = [](const std::string& of) { return reinterpret_cast<const unsigned char*>(of.data()); };
  crypto_generichash(reinterpret_cast<unsigned char*>(digest.data()), digest.size(), bytes(job), job.size(),
                     bytes(token), token.size());
  return transport::hexadecimal(digest);
}

}  // namespace

EtcdStore::EtcdStore(std::string address, Access access)
    : address_(std::move(address)),
      root_("/lockstep/" + cluster::parse_etcd(address_).job + "/"),
      access_(std::move(access)),
      client_(cluster::parse_etcd(address_).endpoints),
      leases_(client_) {}

std::shared_ptr<EtcdStore> EtcdStore::connect(const std::string& address, Deadline deadline, const Access& access) {
  auto store = std::make_shared<EtcdStore>(address, access);
  store->begin(deadline);
  return store;
}

// The first process of a job makes the lease of its keys, which all renew.
void EtcdStore::begin(Deadline deadline) {
  const auto key = root_ + "token", digest = digest_of(access_.token, root_);
  const auto lease = client_.grant(kJobLeaseSeconds, deadline);
  TxnRequest request;
  require_none(request, key);
  add_put(*request.mutable_success(), key, text(digest, " ", lease), lease);
  add_range(*request.mutable_failure(), {key, ""});
  const auto response = txn(request, deadline);
  lease_ = lease;
  if (!response.succeeded()) {
    std::string found;
    std::int64_t first = 0;
    std::istringstream(value_in(response, 0).value_or("")) >> found >> first;
    if (first != lease) client_.revoke(lease, deadline);
    if (found != digest) {
      throw ClusterError(text("the store at ", address_,
                              " is that of a job with another token: one of this name runs, or ",
                              "ended less than ten minutes ago; give another name, or that job's token"));
    }
    lease_ = first;
  }
  leases_.add(lease_);
}

TxnResponse EtcdStore::txn(const TxnRequest& request, Deadline deadline) {
  try {
    return client_.txn(request, deadline);
  } catch (const DeadlineExceeded& late) {
    throw DeadlineExceeded(text("the store at ", address_), late.waited_for(), {}, text(" (", late.what(), ")"));
  } catch (const ClusterError& error) {
    throw ClusterError(text("the store at ", address_, ": ", error.what()));
  }
}

std::string EtcdStore::local_address(Deadline deadline) {
  return transport::address_towards(cluster::host_of(client_.endpoint(), "the store's address"), deadline);
}

std::string EtcdStore::process(int number) const {
  return text(root_, "process/", space_of_processes(), "/", number, "/");
}

EtcdStore::Entries EtcdStore::read(const std::vector<std::string>& whole, Deadline deadline) {
  Entries entries{.values = {}, .revision = std::numeric_limits<std::int64_t>::max()};
  for (std::size_t first = 0; first < whole.size(); first += kMostOperations) {
    TxnRequest request;
    const auto end = std::min(first + kMostOperations, whole.size());
    for (auto i = first; i < end; ++i) add_range(*request.mutable_success(), {whole[i], ""});
    const auto response = txn(request, deadline);
    entries.revision = std::min(entries.revision, response.header().revision());
    for (int i = 0; i < response.responses_size(); ++i) entries.values.push_back(value_in(response, i));
  }
  return entries;
}

// Reads values, also those that keys got because a process has ended.
EtcdStore::Entries EtcdStore::find(const std::vector<std::string>& keys, Deadline deadline) {
  std::vector<std::string> whole;
  for (const auto& key : keys) whole.push_back(value_of(key));
  auto entries = read(whole, deadline);
  std::vector<std::size_t> missing;
  std::vector<std::string> of_ends;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (entries.values[i]) continue;
    missing.push_back(i);
    of_ends.insert(of_ends.end(), {last_of(keys[i]), life_of(keys[i])});
  }
  if (missing.empty()) return entries;
  const auto ends = read(of_ends, deadline);
  for (std::size_t i = 0; i < missing.size(); ++i) {
    const auto &last = ends.values[2 * i], &life = ends.values[2 * i + 1];
    if (!last || life) continue;
    TxnRequest request;
    const auto key = whole[missing[i]];
    require_none(request, key);
    add_put(*request.mutable_success(), key, *last, lease_);
    add_range(*request.mutable_failure(), {key, ""});
    const auto response = txn(request, deadline);
    entries.values[missing[i]] = response.succeeded() ? last : value_in(response, 0);
  }
  return entries;
}

void EtcdStore::set(const std::string& key, const std::string& value, Deadline deadline) {
  TxnRequest request;
  add_put(*request.mutable_success(), value_of(key), value, lease_);
  txn(request, deadline);
}

std::vector<std::string> EtcdStore::get(const std::vector<std::string>& keys, Deadline deadline) {
  std::vector<std::string> values(keys.size()), missing = keys;
  while (true) {
    const auto entries = find(missing, deadline);
    std::vector<std::string> still_missing;
    for (std::size_t i = 0; i < missing.size(); ++i) {
      if (!entries.values[i]) {
        still_missing.push_back(missing[i]);
        continue;
      }
      for (std::size_t place = 0; place < keys.size(); ++place) {
        if (keys[place] == missing[i]) values[place] = *entries.values[i];
      }
    }
    missing = std::move(still_missing);
    if (missing.empty()) return values;
    require_no_failure(missing, deadline);
    if (deadline.passed()) throw DeadlineExceeded(text("the store at ", address_), deadline.waited());
    std::vector<Range> ranges{prefix_range(failures())};
    ranges.push_back({value_of(missing[0]), ""});  // the others are looked for when that is there
    ranges.push_back({life_of(missing[0]), ""});
    client_.wait_for_change(ranges, entries.revision, deadline);
  }
}

void EtcdStore::require_no_failure(const std::vector<std::string>& missing, Deadline deadline) {
  TxnRequest request;
  add_range(*request.mutable_success(), prefix_range(failures()));
  const auto response = txn(request, deadline);
  for (const auto& failure : response.responses(0).response_range().kvs()) {
    const auto packed = cluster::unpack(failure.key().substr(failures().size()));
    if (!packed || packed->size() != 2) continue;
    const auto &prefix = (*packed)[0], &suffix = (*packed)[1];
    for (const auto& key : missing) {
      if (key.starts_with(prefix) && key.ends_with(suffix)) throw ClusterError(failure.value());
    }
  }
}

std::vector<std::string> EtcdStore::missing(const std::vector<std::string>& keys, Deadline deadline) {
  const auto entries = find(keys, deadline);
  std::vector<std::string> missing;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (!entries.values[i]) missing.push_back(keys[i]);
  }
  return missing;
}

std::int64_t EtcdStore::add(const std::string& key, std::int64_t difference, Deadline deadline) {
  const auto value = value_of(key), call = root_ + "added/" + transport::random_name();
  while (true) {
    TxnRequest ask;
    add_range(*ask.mutable_success(), {value, ""});
    const auto found = txn(ask, deadline);
    const auto& kvs = found.responses(0).response_range().kvs();
    const auto before = kvs.empty() ? 0 : whole_number(kvs[0].value());
    std::int64_t sum = 0;
    if (!before || __builtin_add_overflow(*before, difference, &sum)) {
      throw ClusterError(text("the store at ", address_, ": \"", kvs[0].value(), "\" at ", key, " and ", difference,
                              " have no sum of 64 bits"));
    }
    TxnRequest change;
    require_none(change, call);
    auto& unchanged = *change.add_compare();
    unchanged.set_target(Compare::MOD);
    unchanged.set_key(value);
    unchanged.set_mod_revision(kvs.empty() ? 0 : kvs[0].mod_revision());
    add_put(*change.mutable_success(), value, std::to_string(sum), lease_);
    add_put(*change.mutable_success(), call, std::to_string(sum), lease_);
    add_range(*change.mutable_failure(), {call, ""});
    const auto response = txn(change, deadline);
    if (response.succeeded()) return sum;
    // An attempt whose answer was lost has done it.
    if (const auto done = value_in(response, 0)) return whole_number(*done).value_or(0);
  }
}

std::string EtcdStore::compare_set(const std::string& key, const std::string& expected, const std::string& desired,
                                   Deadline deadline) {
  while (true) {
    const auto found = expected.empty() ? find({key}, deadline).values[0] : std::nullopt;
    if (found && !found->empty()) return *found;
    if (expected.empty() && desired.empty()) return "";
    TxnRequest request;
    const auto value = value_of(key);
    if (expected.empty() && !found) {
      require_none(request, value);
    } else {
      auto& compare = *request.add_compare();
      compare.set_target(Compare::VALUE);
      compare.set_key(value);
      compare.set_value(expected);
    }
    add_put(*request.mutable_success(), value, desired, lease_);
    add_range(*request.mutable_failure(), {value, ""});
    const auto response = txn(request, deadline);
    if (response.succeeded()) return desired;
    const auto now = value_in(response, 0);
    if (!expected.empty() || (now && !now->empty())) return now.value_or("");
  }
}

// Keeps a lease, at whose end others set the key.
std::shared_ptr<void> EtcdStore::set_at_end(const std::string& key, const std::string& value, Deadline deadline) {
  const auto lease = client_.grant(kLeaseSeconds, deadline);
  TxnRequest request;
  auto& puts = *request.mutable_success();
  add_put(puts, last_of(key), value, lease_);
  add_put(puts, life_of(key), "", lease);
  add_put(puts, text(process(getpid()), lease), "", lease);
  txn(request, deadline);
  leases_.add(lease);
  return {this, [store = shared_from_this(), key, value, lease](void*) {
            store->leases_.remove(lease);
            try {
              store->compare_set(key, "", value, Deadline::after(kToEnd));
              store->client_.revoke(lease, Deadline::after(kToEnd));
            } catch (const Error&) {  // the lease ends by itself
            }
          }};
}

void EtcdStore::fail_waiters(const std::string& prefix, const std::string& suffix, const std::string& reason,
                             Deadline deadline) {
  TxnRequest request;
  const auto key = failures() + cluster::pack({prefix, suffix});
  require_none(request, key);
  add_put(*request.mutable_success(), key, reason, lease_);
  txn(request, deadline);
}

// Its leases end now, and not in some seconds.
void EtcdStore::notice_end(int number, Deadline deadline) {
  TxnRequest request;
  const auto prefix = process(number);
  add_range(*request.mutable_success(), prefix_range(prefix));
  const auto response = txn(request, deadline);
  for (const auto& entry : response.responses(0).response_range().kvs()) {
    if (const auto lease = whole_number(entry.key().substr(prefix.size()))) client_.revoke(*lease, deadline);
  }
}

}  // namespace lockstep::etcd

// The library for gRPC gives this function to the process that loads it (cluster/store_backend.h).
extern "C" __attribute__((visibility("default"))) void lockstep_connect_to_etcd(
    std::shared_ptr<lockstep::cluster::StoreBackend>& store, const std::string& address, lockstep::Deadline deadline,
    const lockstep::Access& access) {
  store = lockstep::etcd::EtcdStore::connect(address, deadline, access);
}
