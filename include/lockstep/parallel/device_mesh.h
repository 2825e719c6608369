// DeviceMesh: the ranks of a job as a grid with named axes, and a Communicator along each axis. Torch-free. Follows
// torch.distributed.device_mesh.DeviceMesh and keras.distribution.DeviceMesh.
//
//   lockstep::DeviceMesh mesh({{"data", 2}, {"pipeline", 2}, {"tensor", 2}});  // of the 8 processes of this job
//   lockstep::parallelize_module(*net, mesh["tensor"], plan);
//   lockstep::DistributedDataParallel ddp(net, mesh["data"]);
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/collective/make_group.h"
#include "lockstep/elastic/job.h"

namespace lockstep {
namespace parallel {
class MeshParallelism;
}
namespace elastic {
class Membership;
}

struct DeviceMeshOptions {
  double timeout_seconds = kDefaultTimeoutSeconds;  // how long a call of its Communicators waits for the other ranks
  GroupOptions group = {};                          // how the processes communicate

  // For a ModelParallelStrategy with `elastic`. Ranks stay in the order of the launcher. The first axis gets shorter
  // and longer, so no other axis may be -1. In a process that comes to a running job, `ranks()` is this process alone
  // until the others take it in. Its coordinates are already those of the part that it will have.
  bool elastic = false;
};

// A shared handle. Ranks are laid out in the order of their hosts, the last axis first. So neighbours on the last axis
// share a host where its size divides the host's number of ranks. Put the axis that communicates most last: "tensor".
//
// Constant after construction, except in an elastic ModelParallelStrategy. When ranks are lost or come there, the first
// axis gets shorter or longer, and ranks may get other numbers. The Communicators are used as any other. An error in
// one of them, or in a Group that is split from it, ends the calls in all, on all ranks. PeerLost and DeadlineExceeded
// name ranks of the mesh, and say their coordinates.
class DeviceMesh {
 public:
  struct Axis {
    std::string name;
    int size = 1;  // -1 for one axis: all ranks that the other axes leave
  };

  // A mesh of the processes that a launcher started, or of this one alone. Collective over them. Throws as Job. Throws
  // InvalidArgument, on all ranks, where the product of the sizes is not the number of ranks, for another size than -1
  // below 1, and for empty or equal names.
  explicit DeviceMesh(std::vector<Axis> axes, DeviceMeshOptions options = {});

  // A mesh of the ranks of any Communicator: processes, or the replicas' threads of one (ReplicaContext::group). Ranks
  // with the same `host` share a host. Collective over them; throws the InvalidArgument of the other constructor.
  DeviceMesh(std::vector<Axis> axes, const Communicator& ranks, const std::string& host = "");

  // The ranks whose coordinates on all other axes are this rank's, in the order of this axis. Throws InvalidArgument
  // for an axis that the mesh does not have.
  const Communicator& operator[](const std::string& axis) const;
  bool contains(const std::string& axis) const;

  // All ranks of the mesh, in its order.
  const Communicator& ranks() const;

  const std::vector<Axis>& axes() const;
  int size(const std::string& axis) const { return (*this)[axis].size(); }

  // This rank's coordinate on an axis.
  int coordinate(const std::string& axis) const { return (*this)[axis].rank(); }

  // The processes of the mesh; none where the mesh was made of a Communicator.
  const std::optional<Job>& job() const;
  const DeviceMeshOptions& options() const;

  // "data 1, tensor 0": the coordinates of a rank of `ranks()`.
  std::string coordinates_of(int rank) const;

 private:
  friend class parallel::MeshParallelism;

  // The processes of the mesh, for a strategy; null where the mesh was made of a Communicator.
  std::shared_ptr<elastic::Membership> membership() const;

  // Goes on with the job's next generation: the first axis gets as long as that generation needs. Collective over its
  // ranks, between steps. `regroup_seconds`: until they have come.
  void regroup(double regroup_seconds) const;

  // This rank's number among those with the same coordinate on the first axis.
  int part() const;

  // Throws InvalidArgument the second time: the mesh goes on with the generations of one strategy's job.
  void claim_for_elastic_strategy() const;

  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace lockstep
