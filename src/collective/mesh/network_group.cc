// The backends "tcp" and "ucx": messages over a network.
#include "collective/make.h"
#include "collective/mesh/mesh_group.h"
#include "transport/socket_mesh.h"
#include "transport/ucx_mesh.h"

namespace lockstep {

std::shared_ptr<GroupBackend> make_network_backend(const std::string& network, Bootstrap& members, const Place& place,
                                                   const GroupOptions& options, Patience patience, Deadline deadline) {
  const bool sockets = network == "tcp";
  const MeshGroup::MakeMesh make_mesh = [=](Bootstrap& who, Deadline until) {
    const auto make = sockets ? make_socket_mesh : make_ucx_mesh;
    const AllGather all_gather = [&](const std::string& mine) { return who.all_gather(mine, until); };
    return make({who.rank(), who.size(), who.generation(), place.address, place.access, patience}, all_gather, until);
  };
  return std::make_shared<MeshGroup>(sockets ? "tcp" : "ucx", make_mesh(members, deadline), members.generation(),
                                     options.implementation, make_mesh);
}

}  // namespace lockstep
