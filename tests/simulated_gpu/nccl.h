// NCCL for tests without a GPU. It has NCCL's names and moves the memory of simulated GPUs (cuda_runtime.h) over
// sockets. Its library is libnccl.so.2, which takes the place of NVIDIA's. Ranks are threads of one process or
// processes of one host. LOCKSTEP_SIMULATED_NCCL_VERSION is the version that it reports; else that is 22809.
//
// It behaves as NCCL 2.28 does where programs can tell:
// - Operations run in their stream, in the order of the calls of their communicator.
// - A communicator that does not block returns kInProgress from every call that starts something, also from operations:
//   these are in their stream only when ncclCommGetAsyncError no longer gives kInProgress.
// - An abort ends the operations of its rank alone. An operation whose peer was lost or aborted goes on until its own
//   rank aborts, and no error is reported for it.
// - ncclCommFinalize waits for the other ranks, and so does ncclCommDestroy without it.
//
// - The handle that ncclCommSplit makes is written when the communicator is done, by another thread.
//
// A handle is never used again, so calls with one that was destroyed return kInvalidArgument.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_runtime.h"

namespace simulated_nccl {

// NCCL's results.
inline constexpr int kSuccess = 0;
inline constexpr int kUnhandledCudaError = 1;
inline constexpr int kSystemError = 2;
inline constexpr int kInternalError = 3;
inline constexpr int kInvalidArgument = 4;
inline constexpr int kInvalidUsage = 5;
inline constexpr int kRemoteError = 6;
inline constexpr int kInProgress = 7;

enum DType { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kFloat16, kFloat32, kFloat64, kBfloat16, kDTypes };
enum Op { kSum, kProd, kMax, kMin, kAvg, kOps };

inline constexpr int kNoColor = -1;  // of ncclCommSplit

}  // namespace simulated_nccl

extern "C" {

using ncclComm_t = void*;

struct ncclUniqueId {
  char internal[128];
};

// The fields that all versions since 2.14 have, and that are read here.
struct ncclConfig_t {
  std::size_t size = sizeof(ncclConfig_t);
  unsigned magic = 0xcafebeef;
  unsigned version = 22809;
  int blocking = 1;
};

int ncclGetVersion(int* version);
int ncclGetUniqueId(ncclUniqueId* id);
const char* ncclGetErrorString(int result);
const char* ncclGetLastError(ncclComm_t communicator);

int ncclCommInitRank(ncclComm_t* made, int size, ncclUniqueId id, int rank);
int ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId id, int rank, ncclConfig_t* config);
int ncclCommSplit(ncclComm_t communicator, int color, int key, ncclComm_t* made, ncclConfig_t* config);
int ncclCommFinalize(ncclComm_t communicator);
int ncclCommDestroy(ncclComm_t communicator);
int ncclCommAbort(ncclComm_t communicator);
int ncclCommGetAsyncError(ncclComm_t communicator, int* result);
int ncclCommCount(ncclComm_t communicator, int* count);
int ncclCommUserRank(ncclComm_t communicator, int* rank);
int ncclCommCuDevice(ncclComm_t communicator, int* device);

int ncclGroupStart();
int ncclGroupEnd();
int ncclAllReduce(const void* from, void* to, std::size_t count, int dtype, int op, ncclComm_t communicator,
                  cudaStream_t stream);
int ncclBroadcast(const void* from, void* to, std::size_t count, int dtype, int root, ncclComm_t communicator,
                  cudaStream_t stream);
int ncclReduce(const void* from, void* to, std::size_t count, int dtype, int op, int root, ncclComm_t communicator,
               cudaStream_t stream);
int ncclAllGather(const void* from, void* to, std::size_t count, int dtype, ncclComm_t communicator,
                  cudaStream_t stream);
int ncclReduceScatter(const void* from, void* to, std::size_t count, int dtype, int op, ncclComm_t communicator,
                      cudaStream_t stream);
int ncclSend(const void* from, std::size_t count, int dtype, int peer, ncclComm_t communicator, cudaStream_t stream);
int ncclRecv(void* to, std::size_t count, int dtype, int peer, ncclComm_t communicator, cudaStream_t stream);

// The following functions are for tests.

// Makes something fail on a rank of this process, or on all for -1. Any thread. A null `what` takes all faults back.
// LOCKSTEP_SIMULATED_NCCL_FAULT="what:rank,what:rank" has a process's first faults.
//
// These hold until they are taken back:
//   "no-id"            ncclGetUniqueId returns kSystemError
//   "init-error"       a communicator becomes kSystemError while it is made
//   "init-never-ends"  it stays kInProgress until it is aborted, and the other ranks' with it
//   "abort-hangs"      ncclCommAbort never returns, and operations that have not ended never end
// These happen once to each rank, in its next collective operation, send or recv:
//   "call-error"       the call returns kInternalError
//   "stuck"            the operation goes on until the communicator is aborted
//   "async-error"      so it does, and the communicator becomes kRemoteError
void simulated_nccl_fault(const char* what, int rank);

// The number of calls of collective operations, sends and receives so far, by all ranks of this process.
std::int64_t simulated_nccl_calls();
}
