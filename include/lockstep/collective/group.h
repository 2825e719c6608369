// Group: a fixed set of ranks that reduce and exchange buffers together. Torch-free.
//
// A Group object is one rank's handle, shared by its copies. All ranks call the same operations in one order. An
// operation returns on a rank when that rank's result is complete and its buffers may be used again. A handle's
// operations run one after the other in the order of their calls, whichever threads call. A blocking one on an idle
// Group runs in the caller's thread; `start` uses a thread of the Group's own. Any thread may call `abort` at any time.
//
// Membership never changes. Once an operation threw anything but InvalidArgument, every later one throws as well: make
// a new Group. After a throw the buffers belong to the caller again. Memory from `allocate` between processes does not:
// another rank may still write its part of the result there.
//
// Buffers may be on a GPU, the same one in all calls of a rank. A call is then enqueued in the order of the stream that
// it names, and returns before it is done. Where it fails, buffers have no meaning, and later calls and `check` throw.
//
// Results do not depend on timing: every rank gets the same bits, in each run. float16 and bfloat16 are summed in
// float32 (by NCCL rounded at each hop). mean is the sum divided by size(); integers round towards zero.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/buffer.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/purpose.h"

namespace lockstep {

// Elements for each rank, where ranks' shares differ. Empty: all shares are equal.
using Counts = std::vector<std::size_t>;

// One operation as a value. Ranks' calls agree when kind, dtype, operator, root, sizes and purpose do.
struct Call {
  // clang-format off
  enum class Kind : std::uint8_t {
    barrier, all_reduce, reduce, broadcast, all_gather, gather, scatter, reduce_scatter, all_to_all, send, recv
  };
  // clang-format on

  Kind kind = Kind::barrier;
  ConstBuffer input;
  Buffer output;
  ReduceOp op = ReduceOp::sum;
  int peer = 0;                          // the root; for send and recv the other side
  Counts counts;                         // what each rank sends or gets; for all_to_all what this rank sends to each
  Counts output_counts;                  // of all_to_all: what this rank gets from each
  Deadline::Clock::time_point called{};  // set by Group::start
  std::shared_ptr<const std::string> tensors = {};  // names of what it moves, for timelines; may be null
  Purpose purpose = {};                             // of the call; equal on all ranks
  void* stream = nullptr;  // a cudaStream_t, where buffers are on a GPU; null: CUDA's default stream

  // Returns when every rank has called it.
  static Call barrier();

  // buffer <- op over all ranks' buffers, elementwise.
  static Call all_reduce(Buffer buffer, ReduceOp op);

  // On `root`: output <- op over all ranks' inputs; output may be input. Elsewhere output is not touched.
  static Call reduce(ConstBuffer input, Buffer output, ReduceOp op, int root);

  // buffer <- rank `root`'s buffer.
  static Call broadcast(Buffer buffer, int root);

  // output <- the inputs of ranks 0, 1, ... one after the other. Rank r gives counts[r] elements, or all as many.
  static Call all_gather(ConstBuffer input, Buffer output, Counts counts = {});

  // As all_gather, but only `root` gets an output; elsewhere output is not touched.
  static Call gather(ConstBuffer input, Buffer output, int root, Counts counts = {});

  // Cuts root's input into parts for ranks 0, 1, ...; output <- this rank's. Elsewhere input is not read.
  static Call scatter(ConstBuffer input, Buffer output, int root, Counts counts = {});

  // Cuts the elementwise op over all ranks' inputs into parts for ranks 0, 1, ...; output <- this rank's.
  static Call reduce_scatter(ConstBuffer input, Buffer output, ReduceOp op, Counts counts = {});

  // Cuts each rank's input into parts for ranks 0, 1, ...; output <- the parts for this rank, in the order of ranks.
  static Call all_to_all(ConstBuffer input, Buffer output, Counts input_counts = {}, Counts output_counts = {});

  // Messages between two ranks arrive in the order in which they were sent. A send may return before its recv began.
  static Call send(ConstBuffer buffer, int to);
  static Call recv(Buffer buffer, int from);
};

const char* name_of(Call::Kind kind);  // "all_reduce", ...

// An operation that was started. Copies are handles of one operation; any thread may call.
class Work {
 public:
  struct State;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // Waits until the operation has ended, by its own deadline at the latest, and throws what it threw. On a GPU the
  // calls' streams wait in the place of the caller.
  void wait() const;
  bool done() const;
  bool succeeded() const;  // done, and without an error; of calls on a GPU known a moment later

 private:
  std::shared_ptr<State> state_;
};

using Memory = std::shared_ptr<std::byte[]>;  // of `allocate`: freed with the last copy
class GroupBackend;

// Every operation throws
//   InvalidArgument when the ranks' calls differ, naming one that does: on all ranks where they share memory or are
//     checked (with_checks); else on those that notice, and the others are Aborted. And when this rank's buffers do not
//     fit the operation, or are where the Group cannot move them;
//   PeerLost when another rank's process ended or it left the group;
//   DeadlineExceeded, naming the ranks that were waited for, when the others have not come by the deadline;
//   Aborted once `abort` was called, here or on another rank.
class Group {
 public:
  static constexpr std::size_t kBytesPerPack = 1 << 20;

  // all_reduces of one grouped call are packed together up to `bytes_per_pack` bytes.
  explicit Group(std::shared_ptr<GroupBackend> backend, std::size_t bytes_per_pack = kBytesPerPack);

  int rank() const;
  int size() const;
  std::string backend() const;  // "threads", "shm", ...

  void run(const Call& call, Deadline deadline) const;

  // Runs several calls as one: sends and receives go on side by side; all_reduces of one dtype, operator and purpose
  // are packed into few. Results are as one after the other. Follows ncclGroupStart and Horovod's grouped_allreduce.
  void run(const std::vector<Call>& calls, Deadline deadline) const;

  // Starts calls and does not wait. The buffers belong to the operation until it is done. Calls on a GPU are enqueued
  // at once, by the caller's thread; their streams see the results after Work::wait.
  Work start(Call call, Deadline deadline) const;
  Work start(std::vector<Call> calls, Deadline deadline) const;

  // Starts `act`, which makes calls with work between them, by `run`. No other call of this Group comes between.
  // Buffers are on `device`. For host memory a thread of the Group calls act; for a GPU the caller does, and it
  // enqueues.
  using RunCalls = std::function<void(const std::vector<Call>& calls)>;
  Work start(std::function<void(const RunCalls& run)> act, MemoryDevice device, Deadline deadline) const;

  // Shorthands for run(Call::...).
  void barrier(Deadline deadline) const { run(Call::barrier(), deadline); }
  void all_reduce(Buffer buffer, ReduceOp op, Deadline deadline) const { run(Call::all_reduce(buffer, op), deadline); }
  void broadcast(Buffer buffer, int root, Deadline deadline) const { run(Call::broadcast(buffer, root), deadline); }
  void all_gather(ConstBuffer input, Buffer output, Deadline deadline) const {
    run(Call::all_gather(input, output), deadline);
  }
  void reduce_scatter(ConstBuffer input, Buffer output, ReduceOp op, Deadline deadline) const {
    run(Call::reduce_scatter(input, output, op), deadline);
  }
  void send(ConstBuffer buffer, int to, Deadline deadline) const { run(Call::send(buffer, to), deadline); }
  void recv(Buffer buffer, int from, Deadline deadline) const { run(Call::recv(buffer, from), deadline); }

  // Returns a Group of the ranks that pass the same color (0 or more), ordered by key, then by rank here. Returns
  // nothing on a rank with a negative color. Where this Group has made calls on GPUs, each rank uses the same GPU in
  // the new Group. Collective. Follows MPI_Comm_split.
  std::unique_ptr<Group> split(int color, int key, Deadline deadline) const;

  // Memory, zeroed and aligned to pages, that this Group reduces in place without a copy where it can. Not collective.
  Memory allocate(std::size_t bytes) const;

  // Memory that every rank reads and writes by itself. Element r is rank r's part of `bytes` bytes (1 or more, equal on
  // all ranks), zeroed and aligned to pages. A barrier orders accesses; a part is valid until its rank drops it. Empty
  // on all ranks where some cannot reach the others' memory, as on several hosts. Throws InvalidArgument for 0 bytes,
  // and on those ranks whose heap_bytes are used up. Collective. Follows MPI_Win_allocate_shared.
  std::vector<Memory> allocate_shared(std::size_t bytes, Deadline deadline) const;

  // The backend, and a Group like this one over another backend; for wrappers (group_wrappers.h).
  std::shared_ptr<GroupBackend> shared_backend() const;
  Group with_backend(std::shared_ptr<GroupBackend> backend) const;

  // Returns the number of earlier calls on this rank, which numbers objects that all ranks make over a Group in one
  // order. Not collective. Any thread.
  std::int64_t next_number() const;

  // True where buffers on `device`, this rank's, go from device to device; else they go through host memory.
  // Collective.
  bool reaches(MemoryDevice device, Deadline deadline) const;

  // check: throws what has made the Group fail, and PeerLost where another rank has ended: a call on a GPU fails after
  // it returned. synchronize: returns when all calls on a GPU that this rank has made are done, or throws.
  void check(Deadline deadline) const;
  void synchronize(Deadline deadline) const;

  // Wakes every rank that waits in an operation, now or later, with Aborted(reason). The first reason is kept.
  void abort(const std::string& reason) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// A Group whose ranks are threads of this process; element i is rank i's handle. A rank that waits spins for `spin`
// rounds before it sleeps; pass 0 when there are more ranks than cores.
std::vector<Group> make_thread_groups(int size, int spin = 0);

}  // namespace lockstep
