// The factories of Call and the names of its kinds.
#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/group.h"

namespace lockstep {

const char* name_of(Call::Kind kind) {
  switch (kind) {
    case Call::Kind::barrier: return "barrier";
    case Call::Kind::all_reduce: return "all_reduce";
    case Call::Kind::reduce: return "reduce";
    case Call::Kind::broadcast: return "broadcast";
    case Call::Kind::all_gather: return "all_gather";
    case Call::Kind::gather: return "gather";
    case Call::Kind::scatter: return "scatter";
    case Call::Kind::reduce_scatter: return "reduce_scatter";
    case Call::Kind::all_to_all: return "all_to_all";
    case Call::Kind::send: return "send";
    case Call::Kind::recv: return "recv";
  }
  return "unknown";
}

Call Call::barrier() { return {}; }

Call Call::all_reduce(Buffer buffer, ReduceOp op) {
  return {.kind = Kind::all_reduce, .input = buffer, .output = buffer, .op = op};
}

Call Call::reduce(ConstBuffer input, Buffer output, ReduceOp op, int root) {
  return {.kind = Kind::reduce, .input = input, .output = output, .op = op, .peer = root};
}

Call Call::broadcast(Buffer buffer, int root) {
  return {.kind = Kind::broadcast, .input = buffer, .output = buffer, .peer = root};
}

Call Call::all_gather(ConstBuffer input, Buffer output, Counts counts) {
  return {.kind = Kind::all_gather, .input = input, .output = output, .counts = std::move(counts)};
}

Call Call::gather(ConstBuffer input, Buffer output, int root, Counts counts) {
  return {.kind = Kind::gather, .input = input, .output = output, .peer = root, .counts = std::move(counts)};
}

Call Call::scatter(ConstBuffer input, Buffer output, int root, Counts counts) {
  return {.kind = Kind::scatter, .input = input, .output = output, .peer = root, .counts = std::move(counts)};
}

Call Call::reduce_scatter(ConstBuffer input, Buffer output, ReduceOp op, Counts counts) {
  return {.kind = Kind::reduce_scatter, .input = input, .output = output, .op = op, .counts = std::move(counts)};
}

Call Call::all_to_all(ConstBuffer input, Buffer output, Counts input_counts, Counts output_counts) {
  return {.kind = Kind::all_to_all,
          .input = input,
          .output = output,
          .counts = std::move(input_counts),
          .output_counts = std::move(output_counts)};
}

Call Call::send(ConstBuffer buffer, int to) {
  return {.kind = Kind::send, .input = buffer, .output = {nullptr, 0, buffer.dtype}, .peer = to};
}

Call Call::recv(Buffer buffer, int from) {
  return {.kind = Kind::recv, .input = {nullptr, 0, buffer.dtype}, .output = buffer, .peer = from};
}

}  // namespace lockstep
