#include "cluster/stores.h"

#include <algorithm>
#include <random>
#include <system_error>
#include <thread>

#include "base/text.h"
#include "cluster/store_backend.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep::cluster {
namespace {

constexpr std::chrono::milliseconds kToConnect(500), kToAnswer(1000), kToAskAgain(1000);
constexpr std::chrono::seconds kToAnswerHere(5);      // no link can be broken
constexpr std::chrono::seconds kForEtcdToAnswer(30);  // where it has to elect a leader

}  // namespace

ConnectedStores::ConnectedStores(Store here) : here_(std::move(here)) {}

// Connects to the store. A host that is gone costs the time to connect once in a while, and not at each call.
Store ConnectedStores::at(const std::string& address) {
  if (address == here_.address()) return here_;
  {
    MutexLock lock(mutex_);
    auto& place = places_[address];
    if (place.store) return *place.store;
    if (std::chrono::steady_clock::now() < place.silent_until) {
      throw ClusterError(text("the store at ", address, " did not answer just now"));
    }
  }
  try {
    if (!transport::answers_at(address, Deadline::after(kToConnect))) {
      throw ClusterError(text("no store answers at ", address));
    }
    auto store = Store::connect(address, Deadline::after(kToAnswer), here_.access()).prefixed(here_.prefix());
    MutexLock lock(mutex_);
    places_[address].store = store;
    return store;
  } catch (const Error&) {
    forget(address);
    throw;
  }
}

void ConnectedStores::forget(const std::string& address) {
  MutexLock lock(mutex_);
  places_[address] = {.store = {}, .silent_until = std::chrono::steady_clock::now() + kToAskAgain};
}

std::string ConnectedStores::compare_set(const std::string& store, const std::string& key, const std::string& expected,
                                         const std::string& desired) {
  if (store == here_.address()) {
    const auto longest = is_etcd(store) ? kForEtcdToAnswer : kToAnswerHere;
    return here_.compare_set(key, expected, desired, Deadline::after(longest));
  }
  const auto there = at(store);
  try {
    return there.compare_set(key, expected, desired, Deadline::after(kToAnswer));
  } catch (const Error&) {
    forget(store);
    throw;
  }
}

std::vector<std::optional<std::string>> ConnectedStores::get(const std::string& store,
                                                             const std::vector<std::string>& keys, Deadline deadline) {
  const auto there = at(store);
  std::vector<std::optional<std::string>> found(keys.size());
  std::vector<int> missing;
  try {
    const auto all = there.get(keys, deadline);
    std::copy(all.begin(), all.end(), found.begin());
    return found;
  } catch (const DeadlineExceeded& late) {
    missing = late.ranks();
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (std::find(missing.begin(), missing.end(), static_cast<int>(i)) != missing.end()) continue;
    auto value = compare_set(store, keys[i], "", "");
    if (!value.empty()) found[i] = std::move(value);
  }
  return found;
}

double ConnectedStores::now() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void ConnectedStores::for_each(std::size_t count, const std::function<void(std::size_t)>& ask) {
  std::vector<std::jthread> threads;
  for (std::size_t i = 1; i < count; ++i) {
    try {
      threads.emplace_back(ask, i);
    } catch (const std::system_error&) {  // there are too many threads
      ask(i);
    }
  }
  if (count > 0) ask(0);
}

void ConnectedStores::pause(double longest_seconds) {
  thread_local std::minstd_rand random{std::random_device()()};
  std::this_thread::sleep_for(
      std::chrono::duration<double>(std::uniform_real_distribution<>(0, longest_seconds)(random)));
}

}  // namespace lockstep::cluster
