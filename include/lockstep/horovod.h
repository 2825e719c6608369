// Horovod's front end: the calls of horovod.torch for a loop of your own, and the parts that fit needs. Names, defaults
// and results are Horovod's.
//
//   namespace hvd = lockstep::horovod;
//   hvd::init();
//   torch::optim::SGD sgd(net->parameters(), 0.01 * hvd::size());
//   hvd::broadcast_parameters(*net, 0);
//   hvd::DistributedOptimizer optimizer(sgd);          // lockstep/horovod/optimizer.h
//
// Processes are found as by MultiWorkerMirroredStrategy (docs/launching.md): started by mpirun, `lockstep run`, srun,
// torchrun or by hand. Every rank makes the same calls in the same order, whichever threads make them. Before each call
// the ranks compare it, names included. Where calls differ, all ranks throw InvalidArgument, which names two that do,
// and the next call works again. Operations take the tensor as it is at the call and run one after the other in a
// thread of their own. Tensors on a GPU stay on GPUs, and the current stream waits for a result in the place of the
// host. Each rank has one GPU, that of its first such tensors. Where some ranks' tensors are elsewhere, all go through
// host memory. What fails on a GPU is thrown by a later operation.
//
// Calls that return tensors, and not handles, are differentiable as those of horovod.torch. For allreduce and alltoall,
// backward makes the same call for the gradients. For allgather it takes this rank's rows of their average. For
// broadcast it gives the average to the root, and zeros to the others. For reducescatter it gathers the gradients,
// times size() where the op was Sum. So all ranks call backward, on graphs whose operations have the same order. The
// tensor requires a gradient on all ranks or on none. Results of asynchronous calls, and of those that end in _, are
// detached.
//
// Every operation throws:
//   InvalidArgument when calls differ, and for tensors of complex and quantized dtypes (bool: by Min and Max alone),
//     and in backward where the op was Min, Max or Product.
//   Error when `init` was not called.
//   PeerLost, DeadlineExceeded and Aborted as a Group (group.h): then end, for the job to be started again.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/cluster/cluster.h"
#include "lockstep/collective/make_group.h"
#include "lockstep/horovod/process_set.h"
#include "lockstep/ops/tensor.h"

namespace c10 {
struct IValue;
}
namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace lockstep::horovod {

struct InitOptions {
  GroupOptions group = {};                          // its timeout_seconds: until all ranks have come
  double timeout_seconds = kDefaultTimeoutSeconds;  // how long an operation waits for the other ranks
  double regroup_seconds = 60;                      // of elastic jobs: how long ranks that remain wait for each other
  std::optional<Cluster> cluster = {};              // instead of what the launcher left in the environment
};

// Finds the other ranks, and keeps this process and LibTorch's threads to its share of the host's cores, unless its
// launcher did, or OMP_NUM_THREADS says how many threads. Call it before anything computes; a second call does nothing.
// Throws as Job and make_group.
void init(const InitOptions& options = {});

// Ends what was started and leaves the ranks. Does nothing when not initialized.
void shutdown();
bool is_initialized();

int rank();
int size();
int local_rank();  // among those of this host
int local_size();
int cross_rank();  // among those of other hosts with the same local rank
int cross_size();
bool is_homogeneous();  // whether all hosts have as many ranks

// average: the sum divided by the number of ranks; integers round towards zero. adasum: of pairs of ranks, then of
// pairs of pairs (Maleki et al., "Scaling distributed training with adaptive summation", 2021). Adasum is for allreduce
// alone, floating-point tensors, numbers of ranks that are powers of two, and while no rank has joined.
enum class Op : std::uint8_t { average, sum, min, max, product, adasum };
inline constexpr Op Average = Op::average, Sum = Op::sum, Min = Op::min, Max = Op::max, Product = Op::product,
                    Adasum = Op::adasum;
const char* name_of(Op op);  // "Average", ...

// The type in which float and double tensors are sent. They are summed in float.
enum class Compression : std::uint8_t { none, fp16, bf16 };

struct ReduceOptions {
  Op op = Average;
  Compression compression = Compression::none;
  double prescale_factor = 1, postscale_factor = 1;  // before and after the reduction
  std::string name = {};
  ProcessSet process_set = {};
};

// An operation that was started. Copies are handles of the same one.
template <class Result>
class Handle {
 public:
  Handle(Work work, std::shared_ptr<Result> result) : work_(std::move(work)), result_(std::move(result)) {}
  bool done() const { return work_.done(); }
  Result wait() const {
    work_.wait();
    return *result_;
  }

 private:
  Work work_;
  std::shared_ptr<Result> result_;
};

using Tensors = std::vector<Tensor>;

// poll: whether the operation is done. synchronize: returns its result, or throws its error.
template <class Result>
bool poll(const Handle<Result>& handle) {
  return handle.done();
}
template <class Result>
Result synchronize(const Handle<Result>& handle) {
  return handle.wait();
}

// Reduce elementwise over all ranks, whose tensors have one shape and dtype. Calls that end in _ write to the tensor;
// grouped ones reduce several tensors together. A rank that has joined counts as zeros, in sums and averages.
Handle<Tensor> allreduce_async(const Tensor& tensor, const ReduceOptions& options = {});
Handle<Tensor> allreduce_async_(Tensor tensor, const ReduceOptions& options = {});
Handle<Tensors> grouped_allreduce_async(const Tensors& tensors, const ReduceOptions& options = {});
Handle<Tensors> grouped_allreduce_async_(Tensors tensors, const ReduceOptions& options = {});
Tensor allreduce(const Tensor& tensor, const ReduceOptions& options = {});
Tensor allreduce_(Tensor tensor, const ReduceOptions& options = {});
Tensors grouped_allreduce(const Tensors& tensors, const ReduceOptions& options = {});
Tensors grouped_allreduce_(Tensors tensors, const ReduceOptions& options = {});

// [sum of the ranks' first dimensions, ...]: their tensors one after the other. All but the first dimension is equal.
Handle<Tensor> allgather_async(const Tensor& tensor, const std::string& name = "", const ProcessSet& process_set = {});
Handle<Tensors> grouped_allgather_async(const Tensors& tensors, const std::string& name = "",
                                        const ProcessSet& process_set = {});
Tensor allgather(const Tensor& tensor, const std::string& name = "", const ProcessSet& process_set = {});
Tensors grouped_allgather(const Tensors& tensors, const std::string& name = "", const ProcessSet& process_set = {});

// Rank `root_rank`'s tensor; all have its shape and dtype.
Handle<Tensor> broadcast_async(const Tensor& tensor, int root_rank, const std::string& name = "",
                               const ProcessSet& process_set = {});
Handle<Tensor> broadcast_async_(Tensor tensor, int root_rank, const std::string& name = "",
                                const ProcessSet& process_set = {});
Tensor broadcast(const Tensor& tensor, int root_rank, const std::string& name = "", const ProcessSet& process_set = {});
Tensor broadcast_(Tensor tensor, int root_rank, const std::string& name = "", const ProcessSet& process_set = {});

// Sends splits[r] rows of the tensor to rank r, in order; empty: equal parts. output: [sum of received_splits, ...],
// in the order of ranks.
struct AlltoallResult {
  Tensor output;
  std::vector<std::int64_t> received_splits;  // [size()]
};
Handle<AlltoallResult> alltoall_async(const Tensor& tensor, const std::vector<std::int64_t>& splits = {},
                                      const std::string& name = "", const ProcessSet& process_set = {});
AlltoallResult alltoall(const Tensor& tensor, const std::vector<std::int64_t>& splits = {},
                        const std::string& name = "", const ProcessSet& process_set = {});

// Reduces elementwise over all ranks. Each gets equally many rows, the first ones one more where rows do not divide.
Handle<Tensor> reducescatter_async(const Tensor& tensor, const ReduceOptions& options = {});
Handle<Tensors> grouped_reducescatter_async(const Tensors& tensors, const ReduceOptions& options = {});
Tensor reducescatter(const Tensor& tensor, const ReduceOptions& options = {});
Tensors grouped_reducescatter(const Tensors& tensors, const ReduceOptions& options = {});

// [sizes of a rank's]: the sum or average of sparse COO tensors, not coalesced: the ranks' entries one after the other.
// Ranks may have different numbers of entries. Not differentiable.
Handle<Tensor> sparse_allreduce_async(const Tensor& tensor, const ReduceOptions& options = {});
Tensor sparse_allreduce(const Tensor& tensor, const ReduceOptions& options = {});

// Returns when every rank has called it, and all earlier calls of this rank on GPUs are done. Throws where one failed.
void barrier(const ProcessSet& process_set = {});

// For ranks whose numbers of steps differ. Until all ranks have called it, this rank takes part in the others'
// allreduces with zeros and in their DistributedOptimizers' steps with no data. Other operations throw InvalidArgument
// meanwhile. Returns the last rank to join, whose parameters are those to broadcast then.
int join();

// All ranks get root's parameters and buffers.
void broadcast_parameters(torch::nn::Module& module, int root_rank, const ProcessSet& process_set = {});

// All ranks get the state of root's optimizer: momenta, steps, learning rates and other options. Throws InvalidArgument
// for torch::optim::LBFGS, as Horovod does: LibTorch cannot save its state.
void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, int root_rank, const ProcessSet& process_set = {});

// The IValue may hold all but modules: numbers, strings, tensors, and lists, dictionaries and tuples of them.
c10::IValue broadcast_object(const c10::IValue& object, int root_rank, const std::string& name = "",
                             const ProcessSet& process_set = {});
std::vector<c10::IValue> allgather_object(const c10::IValue& object, const std::string& name = "",
                                          const ProcessSet& process_set = {});

}  // namespace lockstep::horovod

#include "lockstep/horovod/callbacks.h"
#include "lockstep/horovod/elastic.h"
#include "lockstep/horovod/optimizer.h"
