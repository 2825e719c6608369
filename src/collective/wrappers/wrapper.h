// A backend that forwards every call to another one; wrappers override what they change.
#pragma once

#include "collective/backend.h"
#include "lockstep/cluster/store.h"
#include "lockstep/collective/group.h"

namespace lockstep::collective {

class Wrapper : public GroupBackend {
 public:
  explicit Wrapper(std::shared_ptr<GroupBackend> inner) : inner_(std::move(inner)) {}

  const char* name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::int64_t generation() const override { return inner_->generation(); }
  const char* run(const Call& call, Deadline deadline) override { return inner_->run(call, deadline); }
  const char* exchange(std::span<const Call> calls, Deadline deadline) override {
    return inner_->exchange(calls, deadline);
  }
  EnqueuedCalls enqueue(std::span<const Call> calls, Deadline deadline) override {
    return inner_->enqueue(calls, deadline);
  }
  bool reaches(MemoryDevice device, Deadline deadline) override { return inner_->reaches(device, deadline); }
  void look(const char* operation, bool also_left) override { inner_->look(operation, also_left); }
  transport::ShownNumbers* numbers() override { return inner_->numbers(); }
  void synchronize(Deadline deadline) override { inner_->synchronize(deadline); }
  void begin_split(int color, int key, Deadline deadline) override { inner_->begin_split(color, key, deadline); }
  std::shared_ptr<GroupBackend> make(cluster::Bootstrap& members, Deadline deadline) const override {
    return inner_->make(members, deadline);
  }
  Memory allocate(std::size_t bytes) override { return inner_->allocate(bytes); }
  std::vector<Memory> allocate_shared(std::size_t bytes, Deadline deadline) override {
    return inner_->allocate_shared(bytes, deadline);
  }
  void fail(const Failure& failure) override { inner_->fail(failure); }

 protected:
  GroupBackend& inner() const { return *inner_; }

 private:
  const std::shared_ptr<GroupBackend> inner_;
};

// The operations that `lockstep run --timeline` shows.

// True where the launcher asks for a timeline (LOCKSTEP_TIMELINE).
bool timeline_is_wanted();

// Records the first 50,000 operations of the group, and leaves them in the store when the group ends. Groups that are
// split from it are not recorded. Collective: the first such group of a process sets its clock, from one barrier.
Group with_published_timeline(const Group& group, const Store& store, Deadline deadline);

}  // namespace lockstep::collective
