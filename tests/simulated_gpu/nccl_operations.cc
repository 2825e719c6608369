#include "nccl_operations.h"

#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <utility>

#include "base/text.h"
#include "nccl.h"

namespace simulated_nccl {
namespace {

using Kind = Operation::Kind;
using lockstep::Buffer;
using lockstep::Call;
using lockstep::ConstBuffer;
using lockstep::Deadline;
using lockstep::ReduceOp;
using lockstep::text;
using std::size_t;

bool is_message(const Operation& operation) { return operation.kind == Kind::send || operation.kind == Kind::recv; }

bool is_reduction(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter;
}

bool has_peer(Kind kind) {
  return kind == Kind::broadcast || kind == Kind::reduce || kind == Kind::send || kind == Kind::recv;
}

bool is_unsigned(int dtype) { return dtype == kUint32 || dtype == kUint64; }

// Group's dtype, whose sums and products of integers have the same bits as those of unsigned ones.
lockstep::DType dtype_of(int dtype) {
  switch (dtype) {
    case kInt8: return lockstep::DType::int8;
    case kUint8: return lockstep::DType::uint8;
    case kInt32:
    case kUint32: return lockstep::DType::int32;
    case kInt64:
    case kUint64: return lockstep::DType::int64;
    case kFloat16: return lockstep::DType::float16;
    case kFloat32: return lockstep::DType::float32;
    case kFloat64: return lockstep::DType::float64;
    default: return lockstep::DType::bfloat16;
  }
}

ReduceOp op_of(const Operation& operation) {
  switch (operation.op) {
    case kProd: return ReduceOp::product;
    case kMax: return ReduceOp::max;
    case kMin: return ReduceOp::min;
    case kAvg: return is_unsigned(operation.dtype) ? ReduceOp::sum : ReduceOp::mean;
    default: return ReduceOp::sum;
  }
}

size_t bytes_of(const Operation& operation) { return operation.count * lockstep::size_of(dtype_of(operation.dtype)); }

size_t bytes_read(const Operation& operation, const Member& member) {
  switch (operation.kind) {
    case Kind::broadcast: return member.rank == operation.peer ? bytes_of(operation) : 0;
    case Kind::reduce_scatter: return bytes_of(operation) * static_cast<size_t>(member.size);
    case Kind::recv: return 0;
    default: return bytes_of(operation);
  }
}

size_t bytes_written(const Operation& operation, const Member& member) {
  switch (operation.kind) {
    case Kind::reduce: return member.rank == operation.peer ? bytes_of(operation) : 0;
    case Kind::all_gather: return bytes_of(operation) * static_cast<size_t>(member.size);
    case Kind::send: return 0;
    default: return bytes_of(operation);
  }
}

std::string problem_with_memory(const char* name, const void* address, size_t bytes, const Member& member) {
  if (bytes == 0) return "";
  if (address == nullptr) return text(name, " is null");
  const int device = simulated_gpu_device(address, bytes);
  if (device == member.device) return "";
  return device < 0 ? text(name, " is not ", bytes, " bytes of one allocation on a device")
                    : text(name, " is on device ", device, ", the communicator on ", member.device);
}

// Calls act(words), a span of the unsigned integers in memory.
template <class Act>
void with_unsigned(int dtype, std::vector<std::byte>& memory, const Act& act) {
  const auto act_on = [&](auto* first) { act(std::span(first, memory.size() / sizeof(*first))); };
  if (dtype == kUint32) {
    act_on(reinterpret_cast<std::uint32_t*>(memory.data()));
  } else {
    act_on(reinterpret_cast<std::uint64_t*>(memory.data()));
  }
}

// Inverts the first bit of unsigned integers, whose order is then that of signed ones.
void change_order(const Operation& operation, std::vector<std::byte>& memory) {
  if (!is_unsigned(operation.dtype) || (operation.op != kMax && operation.op != kMin)) return;
  with_unsigned(operation.dtype, memory, [](auto words) {
    using Word = std::remove_reference_t<decltype(words[0])>;
    for (auto& word : words) word ^= Word{1} << (8 * sizeof(Word) - 1);
  });
}

// Divides sums of unsigned integers.
void divide(const Operation& operation, int size, std::vector<std::byte>& memory) {
  if (!is_unsigned(operation.dtype) || operation.op != kAvg) return;
  with_unsigned(operation.dtype, memory, [&](auto words) {
    for (auto& word : words) word /= static_cast<std::remove_reference_t<decltype(word)>>(size);
  });
}

std::vector<std::byte> copy_of(const void* address, size_t bytes) {
  std::vector<std::byte> copy(bytes);
  if (bytes > 0) std::memcpy(copy.data(), simulated_gpu_memory(address), bytes);
  return copy;
}

// Runs one collective operation on copies in host memory, so that its buffers may overlap as NCCL's do.
void run_collective(const Operation& operation, const lockstep::Group& group) {
  const Member member{group.rank(), group.size()};
  const auto dtype = dtype_of(operation.dtype);
  auto input = copy_of(operation.from, bytes_read(operation, member));
  if (is_reduction(operation.kind)) change_order(operation, input);
  std::vector<std::byte> output(bytes_written(operation, member));
  const auto of = [&](std::vector<std::byte>& memory) {
    return Buffer{memory.data(), memory.size() / lockstep::size_of(dtype), dtype};
  };
  const auto run = [&](const Call& call) { group.run(call, Deadline::never()); };
  switch (operation.kind) {
    case Kind::all_reduce:
      output = std::move(input);
      run(Call::all_reduce(of(output), op_of(operation)));
      break;
    case Kind::broadcast:
      if (!input.empty()) output = std::move(input);
      run(Call::broadcast(of(output), operation.peer));
      break;
    case Kind::reduce: run(Call::reduce(of(input), of(output), op_of(operation), operation.peer)); break;
    case Kind::all_gather: run(Call::all_gather(of(input), of(output))); break;
    default: run(Call::reduce_scatter(of(input), of(output), op_of(operation))); break;
  }
  if (output.empty()) return;
  if (is_reduction(operation.kind)) {
    change_order(operation, output);
    divide(operation, group.size(), output);
  }
  std::memcpy(simulated_gpu_memory(operation.to), output.data(), output.size());
}

// The messages of a rank to itself: the n-th recv gets the n-th send.
std::vector<std::pair<Operation, Operation>> own_messages(const std::vector<Operation>& operations, int rank) {
  std::vector<std::pair<Operation, Operation>> pairs;
  size_t sends = 0, receives = 0;
  for (const auto& operation : operations) {
    if (!is_message(operation) || operation.peer != rank) continue;
    auto& index = operation.kind == Kind::send ? sends : receives;
    if (index == pairs.size()) pairs.push_back({{Kind::send}, {Kind::recv}});
    (operation.kind == Kind::send ? pairs[index].first : pairs[index].second) = operation;
    ++index;
  }
  return pairs;
}

void run_messages(const std::vector<Operation>& operations, const lockstep::Group& group) {
  for (const auto& [send, recv] : own_messages(operations, group.rank())) {
    if (send.count > 0) {
      std::memmove(simulated_gpu_memory(recv.to), simulated_gpu_memory(send.from), bytes_of(send));
    }
  }
  std::vector<Call> calls;
  for (const auto& operation : operations) {
    if (!is_message(operation) || operation.peer == group.rank()) continue;
    const auto dtype = dtype_of(operation.dtype);
    calls.push_back(
        operation.kind == Kind::send
            ? Call::send(ConstBuffer{simulated_gpu_memory(operation.from), operation.count, dtype}, operation.peer)
            : Call::recv(Buffer{simulated_gpu_memory(operation.to), operation.count, dtype}, operation.peer));
  }
  group.run(calls, Deadline::never());
}

}  // namespace

std::string problem_with(const Operation& operation, const Member& member) {
  if (operation.dtype < 0 || operation.dtype >= kDTypes) return text("there is no dtype ", operation.dtype);
  if (is_reduction(operation.kind) && (operation.op < 0 || operation.op >= kOps)) {
    return text("there is no reduction ", operation.op);
  }
  if (has_peer(operation.kind) && (operation.peer < 0 || operation.peer >= member.size)) {
    return text("there is no rank ", operation.peer, "; the communicator has ranks 0 to ", member.size - 1);
  }
  auto problem = problem_with_memory("sendbuff", operation.from, bytes_read(operation, member), member);
  if (problem.empty())
    problem = problem_with_memory("recvbuff", operation.to, bytes_written(operation, member), member);
  return problem;
}

std::string problem_with_own_messages(const std::vector<Operation>& operations, const Member& member) {
  for (const auto& [send, recv] : own_messages(operations, member.rank)) {
    if (bytes_of(send) == bytes_of(recv)) continue;
    return text("rank ", member.rank, " sends ", bytes_of(send), " bytes to itself and receives ", bytes_of(recv));
  }
  return "";
}

void carry_out(const std::vector<Operation>& operations, const lockstep::Group& group) {
  bool has_collectives = false;
  for (const auto& operation : operations) {
    if (is_message(operation)) continue;
    run_collective(operation, group);
    has_collectives = true;
  }
  run_messages(operations, group);
  if (!has_collectives) return;
  // A Group fails on all ranks at once. With a barrier no rank leaves while another still needs it for these results.
  try {
    group.barrier(Deadline::never());
  } catch (const lockstep::Error&) {  // this rank has its results
  }
}

}  // namespace simulated_nccl
