// MultiWorkerMirroredStrategy: one program, started on every host, trains as one.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/cluster/cluster.h"
#include "lockstep/collective/make_group.h"
#include "lockstep/gradient/diloco_options.h"
#include "lockstep/strategy/strategy.h"

namespace lockstep {

using CommunicationImplementation = Implementation;  // the name of tf.distribute

// Follows tf.distribute.experimental.CommunicationOptions.
struct CommunicationOptions {
  // `automatic`: gradients on GPUs are summed by NCCL if each rank can, else in host memory. `nccl`: an error if not.
  CommunicationImplementation implementation = CommunicationImplementation::automatic;
  std::string backend = "auto";              // between workers: as GroupOptions
  std::string network = "tcp";               // between workers: as GroupOptions
  std::optional<double> bucket_cap_mb = {};  // gradients are sent in pieces of this size while backward goes on; empty:
                                             // a sixteenth of them, 1 to 25
  double first_bucket_mb = 1;                // the first, which is ready first
  // DType::float16, DType::bfloat16, or DType::int8 (blocks of 256 with a scale, and error feedback): what float
  // gradients are sent as.
  std::optional<DType> gradient_dtype = {};

  // How long workers wait for each other in one call: to reduce a gradient, to agree, to make copies equal. A replica
  // waits a little longer for the other replicas of its worker.
  double timeout_seconds = kDefaultTimeoutSeconds;
};

// Factors of the learning rate for `ratio` times as many examples in a step: linear (Goyal et al. 2017), and by the
// square root (Krizhevsky 2014).
double linear_scaling(double ratio);
double square_root_scaling(double ratio);

// Each step of fit uses a batch of the data set for each worker. When more workers come, an epoch has fewer steps, with
// more examples each. Follows Horovod, whose batches are those of a process.
struct WorkerBatch {
  // The optimizer's rates, and those that callbacks set, are meant for so many workers. With `n` workers each is
  // multiplied by scaling(n / learning_rate_workers).
  int learning_rate_workers = 1;
  double (*scaling)(double ratio) = linear_scaling;  // linear_scaling, square_root_scaling, or a function of yours
};

// fit goes on with the workers that remain when others are lost or get SIGTERM, and takes in those that come. After
// PyTorch's TorchElastic and Horovod Elastic, whose processes restart or roll back.
struct ElasticOptions {
  // With fewer, they wait for newcomers for `join_seconds`; then callbacks save (on_interrupt) and fit throws
  // ClusterError.
  int min_workers = 1;
  double join_seconds = 30;

  // How long those that remain wait for each other.
  double regroup_seconds = kRegroupTimeoutSeconds;
  // A host that does not answer for so long is lost; from 3 to a day.
  double lost_host_seconds = kElasticLostHostSeconds;

  // Empty: the data set's batches are global, and the weights those of a run with a constant number of workers. Else
  // they are a worker's, for fit alone: ElasticLoop throws InvalidArgument.
  std::optional<WorkerBatch> worker_batch = {};
};

struct MultiWorkerMirroredOptions {
  std::vector<std::string> devices = {};  // of this process, as MirroredOptions; each worker has as many
  int threads_per_replica = 0;            // as MirroredOptions
  CommunicationOptions communication = {};
  std::optional<Cluster> cluster = {};  // instead of what the environment says

  // Each worker has the optimizer's state for its share of the variables alone: with N workers 1/N of the memory for
  // state. It updates that share, and sends it to the others, or writes it into their memory where all are on one host.
  // Checkpoints are whole, and may be restored by any number of workers. On GPUs each GPU of all workers has a share;
  // with `elastic` the update is made in host memory. Workers have GPUs or CPUs alike. After a worker is lost in the
  // middle of an update, the others' variables are partly updated: begin again from a checkpoint. ZeRO stage 1
  // (Rajbhandari et al. 2020), PyTorch's ZeroRedundancyOptimizer.
  //
  // With `elastic` a worker also has the state of a neighbour's share, on another host where possible: 2/N of the
  // memory. The others go on when one is lost. Where both are lost at once, fit goes back to the last backup of
  // BackupAndRestore; without one, and in ElasticLoop, StateLost is thrown on all. After Gemini (Wang et al., SOSP
  // 2023).
  bool shard_optimizer_state = false;

  // Empty: a worker that is lost ends the training. Only where all workers read the same data (AutoShardPolicy::data,
  // the default unless there is a file for each worker).
  std::optional<ElasticOptions> elastic = {};

  // Empty: all workers sum their gradients in each step. Else workers train by themselves and bring their variables
  // together after so many steps, at the end of each epoch of fit, and before fit is interrupted: for slow links. In
  // between their variables differ, and saving throws InvalidArgument. A batch is divided among all workers, and a
  // worker updates by the mean over its own part. Checkpoints hold each worker's state of the optimizer. A new
  // optimizer begins with the chief's variables. Not with shard_optimizer_state and LossScaleOptimizer.
  //
  // With `elastic` the workers that remain meet when one is lost, leaves or comes; a lost worker takes along what it
  // has done since the last meeting. Only with parts 1, overlap 0, workers_per_group 1 and no worker_batch.
  std::optional<DiLoCoOptions> diloco = {};

  // With `diloco`: consecutive workers of this number are a group, which sums gradients in each step; it must divide
  // the number of workers. Groups train by themselves.
  int workers_per_group = 1;

  std::int64_t compare_copies_every = 100;  // steps between comparing a hash of each variable on all workers; 0: never

  // Where more than half of the workers are found to have the same copies, the others get theirs, with the optimizer's
  // state and a warning that names them. The gradients that they computed since they differ have been used. Not with
  // shard_optimizer_state.
  bool replace_differing_copies = false;

  double start_timeout_seconds = kStartTimeoutSeconds;  // until all workers have come
};

// A copy of every variable on each device of every worker, kept equal bit for bit. All workers run the same program:
// they make the same strategies, models and calls in the same order. Initial values are worker 0's (the chief's), who
// alone writes logs and checkpoints.
//
// Copies that are found to differ end the training on all workers with InvalidArgument, which names a worker and a
// variable, unless replace_differing_copies is set.
//
// A worker that is lost ends the training on all others with PeerLost, which names it. With `elastic`, `fit` goes on.
// The others keep their memory, agree on the last step that one of them has applied, and divide the batches anew from
// the next step on. The global batch stays, so the result is that of a run without the loss, but for rounding. Needs a
// launcher that leaves them running: `lockstep run --min-n`.
class MultiWorkerMirroredStrategy : public Strategy {
 public:
  // Waits for all workers. Throws ClusterError, and DeadlineExceeded naming those that have not come.
  explicit MultiWorkerMirroredStrategy(MultiWorkerMirroredOptions options = {});

  int worker_rank() const;
  int num_workers() const;
};

}  // namespace lockstep
