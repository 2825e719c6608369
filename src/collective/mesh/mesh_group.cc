#include "collective/mesh/mesh_group.h"

#include <numeric>

#include "collective/mesh/mesh_collectives.h"
#include "collective/messages.h"

namespace lockstep {

MeshGroup::MeshGroup(const char* name, std::unique_ptr<Mesh> mesh, std::int64_t generation,
                     Implementation implementation, MakeMesh make_mesh)
    : name_(name),
      mesh_(std::move(mesh)),
      generation_(generation),
      implementation_(implementation),
      make_mesh_(std::move(make_mesh)),
      everybody_(static_cast<std::size_t>(mesh_->size())) {
  std::iota(everybody_.begin(), everybody_.end(), 0);
}

const char* MeshGroup::run(const Call& call, Deadline deadline) {
  if (is_message(call)) return exchange({&call, 1}, deadline);
  return run_among(everybody_, call, ++sequence_, deadline);
}

const char* MeshGroup::run_among(const std::vector<int>& members, const Call& call, std::uint32_t sequence,
                                 Deadline deadline) {
  mesh_->check();
  std::vector<std::size_t> all_counts;
  if (call.kind == Call::Kind::all_to_all && !call.counts.empty()) all_counts = gather_counts(*this, call, deadline);
  const auto signature = signature_of(call);
  Team team(*mesh_, members, pack(signature, sequence), deadline, name_of(call.kind), scratch_);
  try {
    return run_on_mesh(team, call, implementation_, all_counts);
  } catch (const WrongMessage& message) {
    // Messages are out of step from here on, on all ranks.
    fail(Failure::aborted(rank(), "the ranks' calls differ"));
    throw_wrong_message(message, rank(), signature, sequence);
  }
}

const char* MeshGroup::exchange(std::span<const Call> calls, Deadline deadline) {
  exchange_messages(*mesh_, calls, deadline);
  return "message";
}

std::shared_ptr<GroupBackend> MeshGroup::make(Bootstrap& members, Deadline deadline) const {
  return std::make_shared<MeshGroup>(name_, make_mesh_(members, deadline), members.generation(), implementation_,
                                     make_mesh_);
}

}  // namespace lockstep
