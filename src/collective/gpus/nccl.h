// NCCL, loaded when a Group first gets a buffer on a GPU: LibTorch's own, the site's, or that which
// LOCKSTEP_NCCL_LIBRARY names. No call waits: a communicator is made without blocking.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

#include "collective/gpus/cuda.h"
#include "lockstep/base/buffer.h"
#include "lockstep/base/deadline.h"

namespace lockstep::collective::gpus {

struct NcclId {
  std::array<char, 128> bytes{};
};

// The first fields of NCCL's ncclConfig_t. NCCL takes the defaults for fields of later versions.
struct NcclConfig {
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};

using NcclHandle = void*;  // an ncclComm_t

// The functions that we call. Each returns an ncclResult_t; dtype and op are NCCL's numbers.
#define LOCKSTEP_NCCL_FUNCTIONS(each)                                                                                  \
  each(ncclGetVersion, int(int* version)) each(ncclGetUniqueId, int(NcclId * id))                                      \
      each(ncclGetErrorString, const char*(int result)) each(ncclGetLastError, const char*(NcclHandle comm)) each(     \
          ncclCommInitRankConfig, int(NcclHandle * made, int size, NcclId id, int rank, NcclConfig* config))           \
          each(ncclCommSplit, int(NcclHandle comm, int color, int key, NcclHandle* made, NcclConfig* config))          \
              each(ncclCommGetAsyncError, int(NcclHandle comm, int* result)) each(ncclCommAbort, int(NcclHandle comm)) \
                  each(ncclCommFinalize, int(NcclHandle comm)) each(ncclCommDestroy, int(NcclHandle comm))             \
                      each(ncclGroupStart, int()) each(ncclGroupEnd, int())                                            \
                          each(ncclAllReduce, int(const void* from, void* to, std::size_t count, int dtype, int op,    \
                                                  NcclHandle, CudaStream))                                             \
                              each(ncclReduce, int(const void* from, void* to, std::size_t, int dtype, int op,         \
                                                   int root, NcclHandle, CudaStream))                                  \
                                  each(ncclReduceScatter, int(const void* from, void* to, std::size_t, int dtype,      \
                                                              int op, NcclHandle, CudaStream))                         \
                                      each(ncclBroadcast, int(const void* from, void* to, std::size_t, int dtype,      \
                                                              int root, NcclHandle, CudaStream))                       \
                                          each(ncclAllGather, int(const void* from, void* to, std::size_t count,       \
                                                                  int dtype, NcclHandle, CudaStream))                  \
                                              each(ncclSend, int(const void* from, std::size_t count, int dtype,       \
                                                                 int to, NcclHandle, CudaStream))                      \
                                                  each(ncclRecv, int(void* to, std::size_t count, int dtype, int from, \
                                                                     NcclHandle, CudaStream))

struct Nccl {
#define LOCKSTEP_MEMBER(name, ...) std::type_identity_t<__VA_ARGS__>* name = nullptr;
  LOCKSTEP_NCCL_FUNCTIONS(LOCKSTEP_MEMBER)
#undef LOCKSTEP_MEMBER

  int version = 0;  // 22809 is 2.28.9
};

inline constexpr int kOldestNccl = 22700;
inline constexpr int kFirstNcclWithSharedGpus = 23000;  // by NCCL_MULTI_RANK_GPU_ENABLE

std::string name_of_version(int version);  // "2.28.9"

// Throws InvalidArgument where there is no NCCL, or one that is too old. Any thread.
const Nccl& nccl();

// Throws Error, naming the function and NCCL's reason, for a result other than success.
void require_nccl(int result, const char* function, NcclHandle communicator = nullptr);

// NCCL's numbers.
int dtype_for_nccl(DType dtype);  // -1 where it has no such type; bools are its bytes
int op_for_nccl(ReduceOp op);
inline constexpr int kNcclBytes = 1;  // ncclUint8

// One rank's communicator. One thread at a time makes calls; any thread may call `error` and `abort`.
class NcclCommunicator {
 public:
  // Collective. `check` is called while it waits, and throws where the ranks cannot meet any more. Throws
  // DeadlineExceeded, and Error where NCCL reports one.
  NcclCommunicator(const NcclId& id, int rank, int size, int device, const std::function<void()>& check,
                   Deadline deadline);

  // Makes a communicator of the ranks with this color, ordered by key, then by rank here. Returns nothing for a
  // negative color. Collective: all ranks call it, when their calls have ended. Throws as the constructor; then this
  // communicator must be aborted.
  std::shared_ptr<NcclCommunicator> split(int color, int key, const std::function<void()>& check, Deadline deadline);

  // Aborts, and waits for a second at most, unless the communicator has ended.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Ends the communicator with those of the other ranks, whose kernels may still read what this one has sent. Returns
  // at once: a thread waits for the others, for seconds at most, and aborts where they do not end theirs.
  static void end(std::shared_ptr<NcclCommunicator> last);

  // Calls `enqueue(handle)`, whose calls of NCCL go on side by side, and returns when NCCL has enqueued them on their
  // streams. It connects ranks at their first calls, for which `check` and the deadline are as above.
  void run(const std::function<void(NcclHandle)>& enqueue, const std::function<void()>& check, Deadline deadline);

  // Returns NCCL's words for an error that it found by itself; empty where there is none.
  std::string error();

  // Ends the running operations of this rank: their buffers have no meaning then. Returns at once, and works in a
  // thread of its own, since NCCL's abort may hang.
  void abort();

 private:
  struct State;  // which that thread shares

  explicit NcclCommunicator(std::shared_ptr<State> state) : state_(std::move(state)) {}

  bool end_with_others();
  std::unique_lock<std::timed_mutex> lock_calls() const;  // throws Aborted

  // Waits until NCCL is no longer busy with `function`, which returned `result`.
  void finish(int result, const char* function, const std::function<void()>& check, Deadline deadline);

  const std::shared_ptr<State> state_;
  bool has_ended_ = false;
};

}  // namespace lockstep::collective::gpus
