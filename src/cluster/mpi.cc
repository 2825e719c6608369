// Reads the variables of Open MPI's mpirun and MPICH's.
#include "base/text.h"
#include "cluster/resolvers.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep::cluster {
namespace {

constexpr std::int64_t kMostDescriptors = 1 << 20;
constexpr std::chrono::seconds kForOwnName(10);

// The loopback address where all ranks are on one host.
std::string host_of_rank_0(const World& world, const Environment& environment) {
  if (world.local_size == world.size) return "127.0.0.1";
  if (environment("MASTER_ADDR") != nullptr) return text_of(environment, "MASTER_ADDR");
  throw ClusterError(
      "Open MPI does not tell where rank 0 runs, and the ranks are on several hosts; name its host: mpirun -x "
      "MASTER_ADDR=host");
}

std::string name_of_host(const World& world, const Environment& environment, const char* variable) {
  return world.local_size == world.size ? "localhost" : text_of(environment, variable);
}

}  // namespace

std::optional<Cluster> from_open_mpi(const Environment& environment) {
  if (environment("OMPI_COMM_WORLD_RANK") == nullptr) return std::nullopt;
  const Names names{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
                    "OMPI_COMM_WORLD_LOCAL_RANK"};
  Cluster cluster{.world = world_of(environment, names), .source = "Open MPI"};
  auto& world = cluster.world;
  if (world.size == 1) return cluster;
  world.host = name_of_host(world, environment, "PMIX_HOSTNAME");
  cluster.store = host_of_rank_0(world, environment);
  cluster.job = "Open MPI " + text_of(environment, "PMIX_NAMESPACE");
  cluster.holds_store = world.rank == 0;
  return cluster;
}

std::optional<Cluster> from_mpich(const Environment& environment) {
  if (environment("PMI_RANK") == nullptr || environment("MPI_LOCALNRANKS") == nullptr) return std::nullopt;
  const Names names{"PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"};
  Cluster cluster{.world = world_of(environment, names), .source = "MPICH"};
  auto& world = cluster.world;
  if (world.size == 1) return cluster;
  world.host = name_of_host(world, environment, "MPIR_CVAR_CH3_INTERFACE_HOSTNAME");
  pmi_descriptor(environment);  // throws where it is none
  cluster.holds_store = world.rank == 0;
  if (cluster.holds_store) {
    cluster.store = world.local_size == world.size
                        ? "127.0.0.1:0"
                        : transport::address_towards(world.host, Deadline::after(kForOwnName)) + ":0";
  }
  return cluster;
}

int pmi_descriptor(const Environment& environment) {
  return static_cast<int>(number_of(environment, "PMI_FD", 0, kMostDescriptors));
}

}  // namespace lockstep::cluster
