#include "nccl_rendezvous.h"

#include <array>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>

#include "base/process.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "nccl.h"
#include "transport/connections.h"

namespace simulated_nccl {
namespace {

using lockstep::Deadline;
using lockstep::text;

// How soon a wait sees that it is to end.
Deadline soon() { return Deadline::after(std::chrono::milliseconds(50)); }

// The stores of ids, by their locations. Threads may outlive all else.
struct HeldStores {
  std::mutex mutex;
  std::map<std::string, lockstep::Store> stores;
};

HeldStores& held_stores() {
  static auto* const held = new HeldStores;
  return *held;
}

// Calls act() until it does not end by its deadline.
template <class Act>
auto retry(const Stop& stop, const Act& act) {
  while (true) {
    if (stop()) throw Failed(kInternalError, "the communicator was aborted");
    try {
      return act();
    } catch (const lockstep::DeadlineExceeded&) {
    }
  }
}

}  // namespace

lockstep::Store hold_store() {
  return lockstep::Store::hold("127.0.0.1:0", {.token = lockstep::transport::random_name()});
}

std::string location_of(const lockstep::Store& store) { return text(store.address(), " ", store.access().token); }

std::string hold_store_of_id() {
  const auto store = hold_store();
  const std::lock_guard lock(held_stores().mutex);
  held_stores().stores.emplace(location_of(store), store);
  return location_of(store);
}

void release_store_of_id(const std::string& location) {
  std::map<std::string, lockstep::Store>::node_type released;  // ends without the lock
  const std::lock_guard lock(held_stores().mutex);
  released = held_stores().stores.extract(location);
}

lockstep::Store connect_to(const std::string& location, const Stop& stop) {
  std::istringstream words(location);
  std::string address, token;
  words >> address >> token;
  if (token.empty()) throw Failed(kInvalidArgument, "this is no id of ncclGetUniqueId");
  return retry(stop, [&] { return lockstep::Store::connect(address, soon(), {.token = token}); });
}

void set(const lockstep::Store& store, const std::string& key, const std::string& value, const Stop& stop) {
  retry(stop, [&] { store.set(key, value, soon()); });
}

std::string wait_for(const lockstep::Store& store, const std::string& key, const Stop& stop) {
  return retry(stop, [&] { return store.get(key, soon()); });
}

std::vector<std::string> Rendezvous::all_gather(const std::string& mine, Deadline) {
  const auto prefix = text("round ", round_++, "/rank ");
  set(store_, text(prefix, rank_), mine, stop_);
  std::vector<std::string> all;
  for (int rank = 0; rank < size_; ++rank) all.push_back(wait_for(store_, text(prefix, rank), stop_));
  return all;
}

Place place_on(int device, const lockstep::Store& store) {
  const char* const host = std::getenv("NCCL_HOSTID");
  std::array<char, 32> address{};
  cudaDeviceGetPCIBusId(address.data(), address.size(), device);
  return {host == nullptr ? lockstep::name_of_this_host() : host, address.data(), location_of(store)};
}

std::vector<Place> gather_places(const Place& mine, Rendezvous& members) {
  std::vector<Place> places;
  for (const auto& words :
       members.all_gather(text(mine.host, "\n", mine.device, "\n", mine.store), Deadline::never())) {
    std::istringstream lines(words);
    auto& place = places.emplace_back();
    for (auto* const field : {&place.host, &place.device, &place.store}) std::getline(lines, *field);
  }
  const char* const may_share = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (may_share != nullptr && std::string(may_share) == "1") return places;
  for (std::size_t b = 0; b < places.size(); ++b) {
    for (std::size_t a = 0; a < b; ++a) {
      if (places[a].host != places[b].host || places[a].device != places[b].device) continue;
      throw Failed(kInvalidUsage, text("Duplicate GPU detected : rank ", a, " and rank ", b, " both on CUDA device ",
                                       places[a].device));
    }
  }
  return places;
}

}  // namespace simulated_nccl
