// How the members of a new group exchange their addresses before they are connected, and find each other through a
// store.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/cluster/store.h"
#include "lockstep/cluster/world.h"

namespace lockstep::cluster {

// One member's end; one thread.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::int64_t generation() const = 0;

  // The rank by which errors name a member.
  virtual int name_of(int rank) const { return rank; }

  // Everybody's text, in the order of ranks. Collective. Throws DeadlineExceeded naming the members that did not come.
  virtual std::vector<std::string> all_gather(const std::string& mine, Deadline deadline) = 0;
};

// Members of a new group find each other through a store.
class StoreBootstrap final : public Bootstrap {
 public:
  // Claims this rank in its generation. Throws ClusterError where another process has it, or where earlier processes
  // reported another number of ranks. Each rank numbers the groups that it makes; equal numbers belong together.
  StoreBootstrap(const World& world, Store store, Deadline deadline);

  int rank() const override { return world_.rank; }
  int size() const override { return world_.size; }
  std::int64_t generation() const override { return world_.generation; }
  std::vector<std::string> all_gather(const std::string& mine, Deadline deadline) override;

  // Tells the other ranks that this group will not be made, so that they do not wait for this rank.
  void give_up(const std::string& reason) const;

 private:
  std::string group(std::int64_t number) const;  // the beginning of its keys
  [[noreturn]] void refuse(const std::string& reason) const;
  std::string members_of_other_generations(const std::vector<int>& ranks) const;

  const World world_;
  const Store store_;
  const std::string generation_;  // the beginning of its keys
  std::string group_;             // and of this group's
  int round_ = 0;
};

}  // namespace lockstep::cluster
