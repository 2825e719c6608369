// Members of a new group find each other through a store.
#pragma once

#include "cluster/bootstrap.h"
#include "lockstep/store.h"
#include "lockstep/world.h"

namespace lockstep {

class StoreBootstrap final : public Bootstrap {
 public:
  // Members whose `name` and generation are equal belong together.
  StoreBootstrap(const World& world, Store store, std::string name)
      : world_(world), store_(std::move(store)), name_(std::move(name)) {}

  int rank() const override { return world_.rank; }
  int size() const override { return world_.size; }
  std::int64_t generation() const override { return world_.generation; }
  std::vector<std::string> all_gather(const std::string& mine, Deadline deadline) override;

 private:
  const World world_;
  const Store store_;
  const std::string name_;
  int round_ = 0;
};

}  // namespace lockstep
