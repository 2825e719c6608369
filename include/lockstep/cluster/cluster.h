// The processes of a job, as the launcher's environment variables describe them. Torch-free.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "lockstep/cluster/world.h"
#include "lockstep/transport/access.h"

namespace lockstep {

// The processes of a job, and this one's place among them.
struct Cluster {
  World world;
  std::string store = {};       // "host:port" of the rendezvous store; empty for a process that is alone
  bool holds_store = false;     // this process answers there; else another does, or the launcher
  std::string job = {};         // with a `store` that is a host alone: the name by which its port is found
  bool joins = false;           // this process comes to a job that runs: `world` is its place on its host
  std::string host_store = {};  // "host:port" of a store on its host, where each host of an elastic job has one
  std::string source = {};      // by whose variables: "TF_CONFIG", "torchrun", ...; empty for a process that is alone

  // Set where the launcher gives processes types, as TF_CONFIG and `lockstep run --ps` do. This one's type is "chief",
  // "worker", "ps" or "evaluator"; `task_index` counts within the type, `tasks` counts each type. With TF_CONFIG,
  // `jobs` are their "host:port"s.
  std::string task_type = "worker";
  int task_index = 0;
  std::map<std::string, int> tasks = {};
  std::map<std::string, std::vector<std::string>> jobs = {};

  // A warning where the variables ask for something that this process does not do. Empty: none.
  std::string warning = {};
};

// Understands, where they are set, the variables of
// - lockstep run: LOCKSTEP_RANK, LOCKSTEP_SIZE, LOCKSTEP_LOCAL_RANK, LOCKSTEP_LOCAL_SIZE, LOCKSTEP_HOST and
//   LOCKSTEP_STORE. With parameter servers also LOCKSTEP_ROLES ("worker:4,ps:2,evaluator:1"). In an elastic job also
//   LOCKSTEP_HOST_STORE, and LOCKSTEP_JOIN=1 where the process comes while the job runs;
// - TensorFlow and Kubeflow's TFJob: TF_CONFIG;
// - torchrun and Kubeflow's PyTorchJob: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR,
//   MASTER_PORT;
// - Kubeflow Trainer: PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT, PET_NPROC_PER_NODE;
// - Open MPI's mpirun and MPICH's: OMPI_COMM_WORLD_..., PMI_... and MPI_LOCAL...;
// - srun: SLURM_PROCID, SLURM_STEP_NODELIST and so on;
// - GKE, on the hosts of a TPU: TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, where there are several and no launcher's;
// - Volcano's plugins env and svc: VC_TASK_INDEX and VC_<TASK>_HOSTS of a Job with one task;
// - Kubernetes, in a pod of an Indexed Job: JOB_COMPLETION_INDEX, with WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the
//   manifest.
// Without any of these variables this process is alone. A part of a launcher's variables, or another launcher's, are an
// error: a process that was to be one of several does not train alone. `names`: the names of all variables, among which
// Volcano's are looked for. Throws ClusterError naming the variable, its field, the value and what is allowed; and both
// sources where two disagree. Any thread.
Cluster resolve_cluster(const Environment& environment, const std::vector<std::string>& names = {});

// The cluster of this process, by its environment. Logs the cluster's warning, once a process. Throws ClusterError as
// above. Any thread may call it while none changes the environment.
Cluster resolve_cluster();

}  // namespace lockstep
