#include "collective/gpus/nccl_calls.h"

#include "base/text.h"
#include "collective/calls.h"
#include "lockstep/base/error.h"

namespace lockstep::collective::gpus {
namespace {

using Kind = Call::Kind;

constexpr int kAnyDirection = 4;  // cudaMemcpyDefault

std::byte* at(const Buffer& buffer, std::size_t element) { return bytes_of(buffer) + element * size_of(buffer.dtype); }
const std::byte* at(const ConstBuffer& buffer, std::size_t element) {
  return bytes_of(buffer) + element * size_of(buffer.dtype);
}

// The elements of a call that rank `r` sends to, or gets from, this one.
struct Parts {
  Slice sent, received;
};

// gather, scatter and all_to_all are messages in NCCL.
Parts parts_with(const Call& call, int rank, int size, int r) {
  const auto ranks = static_cast<std::size_t>(size);
  switch (call.kind) {
    case Kind::gather:
      return {.sent = r == call.peer ? Slice{0, call.input.count} : Slice{},
              .received = rank == call.peer ? share_of(call.counts, call.input.count, r) : Slice{}};
    case Kind::scatter:
      return {.sent = rank == call.peer ? share_of(call.counts, call.output.count, r) : Slice{},
              .received = r == call.peer ? Slice{0, call.output.count} : Slice{}};
    default:
      return {.sent = share_of(call.counts, call.input.count / ranks, r),
              .received = share_of(call.output_counts, call.output.count / ranks, r)};
  }
}

bool is_in_messages(const Call& call) {
  return call.kind == Kind::gather || call.kind == Kind::scatter || call.kind == Kind::all_to_all;
}

void copy_on_gpu(void* to, const void* from, std::size_t bytes, CudaStream stream) {
  if (bytes == 0 || to == from) return;
  require_cuda(cuda().cudaMemcpyAsync(to, from, bytes, kAnyDirection, stream), "cudaMemcpyAsync");
}

bool overlap(const ConstBuffer& a, const ConstBuffer& b) {
  return a.count > 0 && b.count > 0 && bytes_of(a) < bytes_of(b) + b.bytes() && bytes_of(b) < bytes_of(a) + a.bytes();
}

bool share_memory(const Call& a, const Call& b) {
  return overlap(a.output, b.output) || overlap(a.output, b.input) || overlap(a.input, b.output);
}

}  // namespace

bool nccl_knows(const Call& call) { return !is_reduction(call.kind) || dtype_for_nccl(call.input.dtype) >= 0; }

void require_no_capture(std::span<const Call> calls) {
  if (!has_cuda()) return;  // the ranks find out together what one of them lacks
  const OnDevice here(device_of(calls[0]).index);
  for (const auto& call : calls) {
    if (!is_captured(call.stream)) continue;
    throw InvalidArgument(
        text(name_of(call.kind),
             ": the call's stream is being captured into a CUDA graph; a Group's calls on GPUs must be "
             "made outside of captures"));
  }
}

std::size_t number_apart(std::span<const Call> calls) {
  for (std::size_t i = 1; i < calls.size(); ++i) {
    for (const auto& earlier : calls.first(i)) {
      if (share_memory(earlier, calls[i])) return i;
    }
  }
  return calls.size();
}

void copy_own_parts(std::span<const Call> calls, int rank, int size, CudaStream stream) {
  for (const auto& call : calls) {
    if (is_in_messages(call)) {
      const auto own = parts_with(call, rank, size, rank);
      copy_on_gpu(at(call.output, own.received.begin), at(call.input, own.sent.begin),
                  own.sent.count() * size_of(call.input.dtype), stream);
    } else if (size == 1) {
      copy_on_gpu(call.output.data, call.input.data, call.input.bytes(), stream);
    }
  }
}

void enqueue_call(const Call& call, int rank, int size, NcclHandle communicator, CudaStream stream) {
  const auto& library = nccl();
  const auto done = [&](int result, const char* function) { require_nccl(result, function, communicator); };
  const auto element = size_of(call.input.dtype);
  const int dtype = dtype_for_nccl(call.input.dtype), op = op_for_nccl(call.op);
  const auto send = [&](const void* from, std::size_t bytes, int to) {
    if (bytes > 0) done(library.ncclSend(from, bytes, kNcclBytes, to, communicator, stream), "ncclSend");
  };
  const auto receive = [&](void* to, std::size_t bytes, int from) {
    if (bytes > 0) done(library.ncclRecv(to, bytes, kNcclBytes, from, communicator, stream), "ncclRecv");
  };
  const auto broadcast = [&](const void* from, void* to, std::size_t bytes, int root) {
    if (bytes == 0) return;
    done(library.ncclBroadcast(from, to, bytes, kNcclBytes, root, communicator, stream), "ncclBroadcast");
  };
  switch (call.kind) {
    case Kind::barrier: break;  // has no buffer, and so is never on a GPU
    case Kind::all_reduce:
      if (call.input.count == 0) break;
      done(library.ncclAllReduce(call.input.data, call.output.data, call.input.count, dtype, op, communicator, stream),
           "ncclAllReduce");
      break;
    case Kind::reduce:
      if (call.input.count == 0) break;
      done(library.ncclReduce(call.input.data, call.output.data, call.input.count, dtype, op, call.peer, communicator,
                              stream),
           "ncclReduce");
      break;
    case Kind::broadcast: broadcast(call.input.data, call.output.data, call.output.bytes(), call.peer); break;
    case Kind::all_gather:
      if (call.counts.empty()) {
        if (call.input.count == 0) break;
        done(library.ncclAllGather(call.input.data, call.output.data, call.input.bytes(), kNcclBytes, communicator,
                                   stream),
             "ncclAllGather");
        break;
      }
      for (int r = 0; r < size; ++r) {
        const auto share = share_of(call.counts, 0, r);
        auto* const to = at(call.output, share.begin);
        broadcast(r == rank ? call.input.data : to, to, share.count() * element, r);
      }
      break;
    case Kind::reduce_scatter:
      if (call.counts.empty()) {
        if (call.output.count == 0) break;
        done(library.ncclReduceScatter(call.input.data, call.output.data, call.output.count, dtype, op, communicator,
                                       stream),
             "ncclReduceScatter");
        break;
      }
      for (int r = 0; r < size; ++r) {
        const auto share = share_of(call.counts, 0, r);
        if (share.count() == 0) continue;
        done(library.ncclReduce(at(call.input, share.begin), r == rank ? call.output.data : nullptr, share.count(),
                                dtype, op, r, communicator, stream),
             "ncclReduce");
      }
      break;
    case Kind::gather:
    case Kind::scatter:
    case Kind::all_to_all:
      for (int r = 0; r < size; ++r) {
        if (r == rank) continue;
        const auto [sent, received] = parts_with(call, rank, size, r);
        send(at(call.input, sent.begin), sent.count() * element, r);
        receive(at(call.output, received.begin), received.count() * element, r);
      }
      break;
    case Kind::send: send(call.input.data, call.input.bytes(), call.peer); break;
    case Kind::recv: receive(call.output.data, call.output.bytes(), call.peer); break;
  }
}

HostCopies::HostCopies(const Call& call, Stream& stream, Deadline deadline)
    : call_(call),
      stream_(stream),
      input_(private_memory(call.input.bytes())),
      output_(call.output.data == call.input.data ? input_ : private_memory(call.output.bytes())),
      on_host_(call) {
  copy(input_.get(), call.input.data, call.input.bytes(), deadline);
  on_host_.input = {input_.get(), call.input.count, call.input.dtype};
  on_host_.output = {output_.get(), call.output.count, call.output.dtype};
  on_host_.stream = nullptr;
}

void HostCopies::bring_back(int rank, Deadline deadline) {
  const bool only_at_root = call_.kind == Kind::reduce || call_.kind == Kind::gather;
  if (!only_at_root || rank == call_.peer) copy(call_.output.data, output_.get(), call_.output.bytes(), deadline);
}

// The copy is made by the call's stream.
void HostCopies::copy(void* to, const void* from, std::size_t bytes, Deadline deadline) {
  const auto wait = [&] {
    const auto end = stream_.now_in(call_.stream);
    if (wait_until([&] { return has_come(end); }, deadline)) return;
    throw DeadlineExceeded(text(name_of(call_.kind), ", for its GPU's stream"), deadline.waited());
  };
  if (bytes == 0) return;
  wait();
  require_cuda(cuda().cudaMemcpyAsync(to, from, bytes, kAnyDirection, call_.stream), "cudaMemcpyAsync");
  wait();
}

}  // namespace lockstep::collective::gpus
