// Group: a fixed set of ranks that reduce and exchange buffers together. Torch-free.
//
// A Group object is one rank's handle. All ranks call the same operations in the same order; an operation returns on a
// rank when that rank's result is complete and its buffers may be used again. One thread at a time uses a handle;
// `abort` alone may be called from any thread at any time. Membership never changes: after a failure, make a new Group.
//
// Results do not depend on timing: reductions add in rank order, so every rank gets the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/deadline.h"
#include "lockstep/error.h"

namespace lockstep {

enum class DType : std::uint8_t { float32, float64, float16, bfloat16, int32, int64, uint8 };
enum class ReduceOp : std::uint8_t { sum, mean, min, max, product };

std::size_t size_of(DType dtype);  // bytes of one element
const char* name_of(DType dtype);  // "float32", ...
const char* name_of(ReduceOp op);  // "sum", ...

// `count` elements of `dtype` that the caller owns.
struct Buffer {
  void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::float32;

  std::size_t bytes() const { return count * size_of(dtype); }
};

Buffer buffer_of(std::span<float> values);
Buffer buffer_of(std::span<double> values);
Buffer buffer_of(std::span<std::int32_t> values);
Buffer buffer_of(std::span<std::int64_t> values);
Buffer buffer_of(std::span<std::uint8_t> values);

class GroupBackend;

// Every operation throws InvalidArgument on all ranks when the ranks' calls differ (naming a rank that differs from
// rank 0), DeadlineExceeded when the others have not come by the deadline, and Aborted once `abort` was called.
class Group {
 public:
  explicit Group(std::shared_ptr<GroupBackend> backend) : backend_(std::move(backend)) {}

  int rank() const;
  int size() const;

  // buffer <- op over all ranks' buffers, elementwise. float16 and bfloat16 are summed in float32.
  void all_reduce(Buffer buffer, ReduceOp op, Deadline deadline) const;

  // buffer <- rank `root`'s buffer.
  void broadcast(Buffer buffer, int root, Deadline deadline) const;

  // output <- the inputs of ranks 0, 1, ... one after the other; output.count = size() * input.count.
  void all_gather(Buffer input, Buffer output, Deadline deadline) const;

  // output <- op over all ranks of slice rank() of their inputs; input.count = size() * output.count.
  void reduce_scatter(Buffer input, Buffer output, ReduceOp op, Deadline deadline) const;

  // Returns when every rank has called it.
  void barrier(Deadline deadline) const;

  // Wakes every rank that waits in an operation, now or later, with Aborted(reason). The first reason stands.
  void abort(const std::string& reason) const;

 private:
  std::shared_ptr<GroupBackend> backend_;
};

// A Group whose ranks are threads of this process; element i is rank i's handle. Sums are direct: each rank reduces one
// slice of every buffer, so an all-reduce reads and writes each byte once a rank.
// A rank that waits spins for `spin` rounds before it sleeps; pass 0 when there are more ranks than cores.
std::vector<Group> make_thread_groups(int size, int spin = 0);

}  // namespace lockstep
