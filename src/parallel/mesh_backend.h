// Groups of a mesh: what goes wrong in one of them ends the calls in all, and is told in the numbering of the mesh.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "collective/backend.h"
#include "collective/wrappers/wrapper.h"
#include "lockstep/collective/communicator.h"

namespace lockstep::parallel {

// The Groups of a mesh in which one rank is. Any thread.
class MeshGroups {
 public:
  // For an elastic job: returns a rank that has gone, and how long making a Group may take.
  struct Elastic {
    std::function<std::optional<int>()> first_gone;
    std::chrono::duration<double> to_make;
  };

  // `coordinates_of` a rank of the mesh, for messages.
  explicit MeshGroups(std::function<std::string(int)> coordinates_of, std::optional<Elastic> elastic = {})
      : coordinates_of_(std::move(coordinates_of)), elastic_(std::move(elastic)) {}

  void add(const std::shared_ptr<GroupBackend>& backend);

  // The backend of all ranks of the mesh.
  void set_whole(const std::shared_ptr<GroupBackend>& backend) { whole_ = backend; }
  std::shared_ptr<GroupBackend> whole() const { return whole_.lock(); }

  // Wakes the ranks that wait in any of them with Aborted(reason).
  void fail_all(const std::string& reason);

  std::string coordinates_of(int rank) const { return coordinates_of_(rank); }
  const std::optional<Elastic>& elastic() const { return elastic_; }

 private:
  const std::function<std::string(int)> coordinates_of_;
  const std::optional<Elastic> elastic_;
  std::weak_ptr<GroupBackend> whole_;  // constant once the mesh is made
  Mutex mutex_;
  std::vector<std::weak_ptr<GroupBackend>> backends_ LOCKSTEP_GUARDED_BY(mutex_);
};

// A rank that sees an error in one Group fails its other Groups, where ranks may wait. So the error reaches all ranks
// of a mesh, from neighbour to neighbour. PeerLost and DeadlineExceeded name ranks of the mesh.
class MeshBackend final : public collective::Wrapper {
 public:
  // `mesh_ranks`: of the Group's ranks.
  MeshBackend(const std::shared_ptr<GroupBackend>& inner, std::shared_ptr<MeshGroups> groups,
              std::vector<int> mesh_ranks);

  const char* run(const Call& call, Deadline deadline) override;
  const char* exchange(std::span<const Call> calls, Deadline deadline) override;
  EnqueuedCalls enqueue(std::span<const Call> calls, Deadline deadline) override;
  bool reaches(MemoryDevice device, Deadline deadline) override;
  void look(const char* operation, bool also_left) override;
  void begin_split(int color, int key, Deadline deadline) override;
  void synchronize(Deadline deadline) override;

  // Fails the others as well: ranks that wait in them would not learn of it.
  void fail(const Failure& failure) override;
  const std::shared_ptr<MeshGroups>& groups() const { return groups_; }

  // Where a member goes meanwhile, so do these errors.
  std::shared_ptr<GroupBackend> make(cluster::Bootstrap& members, Deadline deadline) const override;

 private:
  template <class Act>
  auto translated(const std::vector<int>& mesh_ranks, const Act& act) const;
  void raise_if_lost(const std::string& message) const;
  [[noreturn]] void raise_lost(int mesh_rank, const std::string& how) const;
  [[noreturn]] void raise_failed_to_make(const std::string& why) const;

  const std::shared_ptr<MeshGroups> groups_;
  const std::vector<int> mesh_ranks_;
};

// All ranks of the mesh that a Communicator is an axis of, or the Communicator itself. Not collective.
Communicator mesh_of(const Communicator& axis);

// Calls `check`. Where it throws InvalidArgument on some ranks, all throw the first one's. Collective.
void check_on_all(const Communicator& ranks, const std::function<void()>& check);

// True where both Groups are of one DeviceMesh: of its axes, or split from these.
bool are_of_one_mesh(const Group& a, const Group& b);

// A Group of many ranks of which one is there: for what a rank of a larger job computes, and what it would communicate.
// One rank's handle. The other ranks give what this one does, but for sums, which are its own alone: values differ from
// those of a real Group, shapes do not. Nothing waits. One thread.
class Rehearsal {
 public:
  struct Counted {
    Call::Kind kind;
    double bytes;  // of the larger of input and output
  };

  explicit Rehearsal(int ranks, int rank = 0);

  // True where the ranks are those of a Rehearsal.
  static bool runs_on(const Communicator& ranks);

  const Communicator& ranks() const { return ranks_; }

  // Returns the calls since the last `take`.
  std::vector<Counted> take();

 private:
  class Backend;
  const std::shared_ptr<Backend> backend_;
  const Communicator ranks_;
};

}  // namespace lockstep::parallel
