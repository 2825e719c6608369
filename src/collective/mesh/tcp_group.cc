// The tcp backend: plain sockets.
#include "collective/make.h"
#include "collective/mesh/mesh_group.h"
#include "transport/socket_mesh.h"

namespace lockstep {

std::shared_ptr<GroupBackend> make_tcp_backend(Bootstrap& members, const World& world, const GroupOptions& options,
                                               Patience patience, Deadline deadline) {
  const MeshGroup::MakeMesh make_mesh = [address = world.address, patience](Bootstrap& who, Deadline until) {
    const MeshOptions mesh{who.rank(), who.size(), who.generation(), address, patience};
    return std::make_unique<SocketMesh>(
        mesh, connect_all(
                  mesh, [&](const std::string& mine) { return who.all_gather(mine, until); }, until));
  };
  return std::make_shared<MeshGroup>("tcp", make_mesh(members, deadline), members.generation(), options.implementation,
                                     make_mesh);
}

}  // namespace lockstep
