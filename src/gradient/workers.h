// The processes that train one model together.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/checkpoint.h"
#include "lockstep/error.h"
#include "lockstep/group.h"

namespace lockstep {

// A shared handle. Collective calls are for one thread at a time, in the same order on all workers.
class Workers {
 public:
  Workers() = default;  // this process alone: collective calls do nothing
  // `idle_cores`: whether this process has more cores than its replicas compute on.
  Workers(Group group, double timeout_seconds, bool idle_cores)
      : group_(std::move(group)), timeout_seconds_(timeout_seconds), idle_cores_(idle_cores) {}

  int rank() const { return group_ ? group_->rank() : 0; }
  int size() const { return group_ ? group_->size() : 1; }
  bool alone() const { return size() == 1; }
  bool is_chief() const { return rank() == 0; }
  bool idle_cores() const { return idle_cores_; }

  // Where there are several.
  const Group& group() const { return *group_; }
  Deadline deadline() const { return Deadline::after(std::chrono::duration<double>(timeout_seconds_)); }

  // Each becomes its sum over the workers; the same bits on all.
  void sum(std::span<double> values) const;

  // Whether it holds on some worker, and on all.
  bool any(bool holds) const;
  bool all(bool holds) const;

  // Each tensor becomes the chief's, on CPU or a device; all have the same shapes and dtypes everywhere.
  void share(const std::vector<at::Tensor>& tensors) const;

  // What the chief gives, on all.
  std::string share(const std::string& bytes) const;

  // Acts on all workers. Where one throws, the others hear why they wait for it in vain; but Interrupted is thrown by
  // all.
  template <class Act>
  void together(const Act& act) const {
    try {
      act();
    } catch (const Interrupted&) {
      throw;
    } catch (const std::exception& error) {
      give_up(error.what());
      throw;
    }
  }
  void give_up(const std::string& why) const;

  // Acts on the chief while the others wait. What it throws there is an Error with the same text elsewhere.
  template <class Act>
  void on_chief(const Act& act) const {
    std::exception_ptr mine;
    std::string failed;
    try {
      if (is_chief()) act();
    } catch (const std::exception& error) {
      mine = std::current_exception();
      failed = error.what();
    }
    failed = share(failed);
    if (mine) std::rethrow_exception(mine);
    if (!failed.empty()) throw Error("worker 0: " + failed);
  }

  // For checkpoints of what they have together; null where this process is alone.
  std::shared_ptr<const SharedBy> shared_by() const;

  // Throws InvalidArgument on all workers where their texts differ, with the first line that does: "the workers' `what`
  // differ: worker 0 has ..., worker 2 has ...".
  void require_same(const std::string& what, const std::string& mine) const;

  // Every worker's bytes, in their order.
  std::vector<std::string> all_gather(const std::string& mine) const;

 private:
  std::optional<Group> group_;
  double timeout_seconds_ = 0;
  bool idle_cores_ = false;
};

// Whether buckets may be reduced while backward goes on. Reduction in memory is work of this host's cores: it helps
// only where some have nothing else to do.
bool may_overlap(const Group& group, bool idle_cores);

}  // namespace lockstep
