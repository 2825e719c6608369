// How the ranks of a new communicator of the simulated NCCL find each other: through a lockstep Store that one holds.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cluster/bootstrap.h"
#include "lockstep/cluster/store.h"

namespace simulated_nccl {

// The result of a call of NCCL, and the words of ncclGetLastError.
class Failed : public std::runtime_error {
 public:
  Failed(int result, const std::string& words) : std::runtime_error(words), result_(result) {}
  int result() const { return result_; }

 private:
  int result_;
};

using Stop = std::function<bool()>;  // returns true where a wait is to end, which then throws Failed

// Holds a store with a new token at a loopback address.
lockstep::Store hold_store();

// The store's address and token: 59 characters at most.
std::string location_of(const lockstep::Store& store);

// The store of an id: this process holds it until it is released, which other processes may do in vain. Any thread.
std::string hold_store_of_id();
void release_store_of_id(const std::string& location);

// Waits until there is a store.
lockstep::Store connect_to(const std::string& location, const Stop& stop);

void set(const lockstep::Store& store, const std::string& key, const std::string& value, const Stop& stop);

// Waits until there is a value.
std::string wait_for(const lockstep::Store& store, const std::string& key, const Stop& stop);

// One rank's end.
class Rendezvous final : public lockstep::cluster::Bootstrap {
 public:
  Rendezvous(lockstep::Store store, int rank, int size, Stop stop)
      : store_(std::move(store)), rank_(rank), size_(size), stop_(std::move(stop)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::int64_t generation() const override { return 0; }

  // Waits until `stop`, whatever the deadline is.
  std::vector<std::string> all_gather(const std::string& mine, lockstep::Deadline deadline) override;

 private:
  const lockstep::Store store_;
  const int rank_;
  const int size_;
  const Stop stop_;
  int round_ = 0;
};

// Each rank tells the others its place when they connect.
struct Place {
  std::string host;
  std::string device;  // its PCI address
  std::string store;   // the location of a store of its own
};

// The place of this process's rank on a device.
Place place_on(int device, const lockstep::Store& store);

// Returns all ranks' places. Collective. Throws where two ranks have one device, unless NCCL_MULTI_RANK_GPU_ENABLE=1.
std::vector<Place> gather_places(const Place& mine, Rendezvous& members);

}  // namespace simulated_nccl
