// Variables that only a process of a job has, where no resolver found all that it needs.
#include "base/text.h"
#include "cluster/resolvers.h"
#include "lockstep/base/error.h"

namespace lockstep::cluster {
namespace {

constexpr const char* kAsTorchrun =
    "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process, as torchrun does";
constexpr const char* kAsTrainer =
    "set PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT on each node, as Kubeflow Trainer does, or "
    "start the program there by torchrun --no-python";

// A variable, what the resolver of that launcher needs too, and the remedy where that is missing.
constexpr const char* kSigns[][3] = {
    {"RANK", "WORLD_SIZE", kAsTorchrun},
    {"WORLD_SIZE", "RANK", kAsTorchrun},
    {"MASTER_ADDR", "RANK", kAsTorchrun},
    {"MASTER_PORT", "RANK", kAsTorchrun},
    {"LOCAL_RANK", "RANK", kAsTorchrun},
    {"LOCAL_WORLD_SIZE", "RANK", kAsTorchrun},
    {"TORCHELASTIC_RUN_ID", "RANK", kAsTorchrun},
    {"LOCKSTEP_SIZE", "LOCKSTEP_RANK", "start the program by lockstep run"},
    {"LOCKSTEP_STORE", "LOCKSTEP_RANK", "start the program by lockstep run"},
    {"PET_NODE_RANK", "PET_NNODES", kAsTrainer},
    {"PET_MASTER_ADDR", "PET_NNODES", kAsTrainer},
    {"PET_RDZV_ENDPOINT", "PET_NNODES", kAsTrainer},
    {"PET_RDZV_ID", "PET_NNODES", kAsTrainer},
    {"PET_NPROC_PER_NODE", "PET_NNODES", kAsTrainer},
    {"JOBSET_NAME", "JOB_COMPLETION_INDEX", kAsTorchrun},
};

// Launchers that are not understood: a process of theirs is alone where they say that there is one. The variables of
// its rank and of their number; null: not told.
constexpr const char* kLaunchers[][2] = {
    {"HOROVOD_RANK", "HOROVOD_SIZE"},  // of horovodrun over gloo
    {"PMI_RANK", "PMI_SIZE"},
    {"PMIX_RANK", nullptr},
    {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"},
    {"PALS_RANKID", nullptr},
    {"FLUX_TASK_RANK", "FLUX_JOB_SIZE"},
    {"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"},
    {"AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"},
    {"LWS_WORKER_INDEX", "LWS_GROUP_SIZE"},  // of a LeaderWorkerSet
};

}  // namespace

Cluster alone(const Environment& environment) {
  for (const auto& [variable, missing, remedy] : kSigns) {
    const char* const value = value_of(environment, variable);
    if (value == nullptr || value_of(environment, missing) != nullptr) continue;
    throw ClusterError(
        text(variable, " is \"", value, "\", and ", missing, " is not set: ", remedy, ", or unset ", variable));
  }
  for (const auto& [variable, of_size] : kLaunchers) {
    const char* const rank = value_of(environment, variable);
    const char* const size = of_size == nullptr ? nullptr : value_of(environment, of_size);
    if (rank == nullptr || (size != nullptr && whole_number(size) == 1)) continue;
    throw ClusterError(text(variable, " is \"", rank, "\", so this is one of the processes of a launcher whose ",
                            "other variables are not understood: ", kAsTorchrun, ", or unset ", variable));
  }
  Cluster cluster;
  if (const char* const tasks = value_of(environment, "SLURM_NTASKS"); tasks != nullptr && whole_number(tasks) > 1) {
    cluster.warning = text("SLURM_NTASKS is ", tasks, ", and this process was not started by srun: it trains alone. ",
                           "Start the program by srun to train with all tasks");
  }
  return cluster;
}

}  // namespace lockstep::cluster
