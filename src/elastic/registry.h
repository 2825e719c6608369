// Entries that the members of a job write for each other. The first value of an entry stays, so that all find the same,
// whenever they read.
#pragma once

#include <string>
#include <vector>

#include "lockstep/cluster/store.h"

namespace lockstep::elastic {

class Registry {
 public:
  virtual ~Registry() = default;

  // Sets the entry where there is none; returns the value that it keeps. An empty `value` is not set.
  virtual std::string enter(const std::string& key, const std::string& value, Deadline deadline) = 0;

  // Waits until all are there. DeadlineExceeded lists, by their places in `keys`, those that are not.
  virtual std::vector<std::string> get(const std::vector<std::string>& keys, Deadline deadline) = 0;

  // Whether the deadline has passed on the clock by which `get` waits.
  virtual bool passed(Deadline deadline) const { return deadline.passed(); }
};

class StoreRegistry final : public Registry {
 public:
  explicit StoreRegistry(Store store) : store_(std::move(store)) {}
  std::string enter(const std::string& key, const std::string& value, Deadline deadline) override {
    return store_.compare_set(key, "", value, deadline);
  }
  std::vector<std::string> get(const std::vector<std::string>& keys, Deadline deadline) override {
    return store_.get(keys, deadline);
  }

 private:
  const Store store_;
};

}  // namespace lockstep::elastic
