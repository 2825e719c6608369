// A Call as calls of NCCL, and as a call in host memory.
#pragma once

#include <span>
#include <vector>

#include "collective/backend.h"
#include "collective/gpus/cuda.h"
#include "collective/gpus/nccl.h"
#include "lockstep/collective/group.h"

namespace lockstep::collective::gpus {

// Throws InvalidArgument where a call's stream is being captured: nobody could watch a call that runs whenever its
// graph does.
void require_no_capture(std::span<const Call> calls);

// How many of the calls, from the first on, use no memory that another of them writes.
std::size_t number_apart(std::span<const Call> calls);

// False where NCCL has no such dtype to reduce; elements that are only moved are bytes.
bool nccl_knows(const Call& call);

// Copies on the GPU the elements that the rank sends to itself.
void copy_own_parts(std::span<const Call> calls, int rank, int size, CudaStream stream);

// Makes the calls of NCCL by which the rank exchanges elements with others. The caller groups them (ncclGroupStart).
void enqueue_call(const Call& call, int rank, int size, NcclHandle communicator, CudaStream stream);

// The call with copies of its buffers in host memory.
class HostCopies {
 public:
  // Waits until the call's stream has come to it, and copies its input. Throws DeadlineExceeded.
  HostCopies(const Call& call, Stream& stream, Deadline deadline);

  const Call& call() const { return on_host_; }

  // Copies the output to the GPU where the rank gets one.
  void bring_back(int rank, Deadline deadline);

 private:
  void copy(void* to, const void* from, std::size_t bytes, Deadline deadline);

  const Call call_;
  Stream& stream_;
  Memory input_, output_;
  Call on_host_;
};

}  // namespace lockstep::collective::gpus
