#include "collective/calls.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/hash.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/group.h"

namespace lockstep {

// The factories of Call and the names of its kinds.
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

namespace lockstep::collective {

using Kind = Call::Kind;

MemoryDevice device_of(const Call& call) {
  const bool is_by_output = call.input.count == 0 && call.input.device.type == MemoryDevice::Type::host;
  return is_by_output ? call.output.device : call.input.device;
}

bool is_reduction(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter;
}

namespace {

bool has_root(Kind kind) {
  return kind == Kind::reduce || kind == Kind::broadcast || kind == Kind::gather || kind == Kind::scatter;
}

std::string words_of(const ConstBuffer& buffer) { return text(buffer.count, " x ", name_of(buffer.dtype)); }

std::size_t sum(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), std::size_t{0}); }

void require_count(const Call& call, const char* which, const ConstBuffer& buffer, std::size_t wanted) {
  if (buffer.count == wanted) return;
  throw InvalidArgument(
      text(name_of(call.kind), ": the ", which, " is ", words_of(buffer), "; it must have ", wanted, " elements"));
}

void require_length(const Call& call, const Counts& counts, int size) {
  if (counts.empty() || counts.size() == static_cast<std::size_t>(size)) return;
  throw InvalidArgument(
      text(name_of(call.kind), ": there are ", counts.size(), " counts; the group has ", size, " ranks"));
}

// Checks the sizes of the whole buffer and of a rank's part, on the ranks that have them.
void require_parts(const Call& call, const char* name, const ConstBuffer& whole, const ConstBuffer& part, int rank,
                   int size, bool has_whole, bool has_part) {
  const auto all = call.counts.empty() ? part.count * static_cast<std::size_t>(size) : sum(call.counts);
  if (has_part && !call.counts.empty()) {
    require_count(call, name == std::string("output") ? "input" : "output", part,
                  call.counts[static_cast<std::size_t>(rank)]);
  }
  if (has_whole) require_count(call, name, whole, all);
}

void require_memory(const Call& call, const ConstBuffer& buffer) {
  size_of(buffer.dtype);  // throws for a dtype that does not exist
  if (buffer.data == nullptr && buffer.count > 0) {
    throw InvalidArgument(text(name_of(call.kind), ": a buffer of ", words_of(buffer), " has no data"));
  }
  if (buffer.count > 0 && buffer.device != device_of(call)) {
    throw InvalidArgument(text(name_of(call.kind), ": a buffer of ", words_of(buffer), " is on ",
                               name_of(buffer.device), ", the other one on ", name_of(device_of(call)),
                               "; both must be on one device"));
  }
}

void require_dtype(const Call& call) {
  if (call.input.dtype == call.output.dtype) return;
  throw InvalidArgument(text(name_of(call.kind), ": the input is ", words_of(call.input), ", the output ",
                             words_of(call.output), "; both must have one dtype"));
}

void require_operator(const Call& call) {
  if (call.input.dtype != DType::boolean || call.op == ReduceOp::min || call.op == ReduceOp::max) return;
  throw InvalidArgument(
      text(name_of(call.kind), ": bools are reduced by min (and) and max (or), not by ", name_of(call.op)));
}

}  // namespace

void check_call(const Call& call, int rank, int size) {
  const bool at_root = rank == call.peer;
  if ((has_root(call.kind) || is_message(call)) && (call.peer < 0 || call.peer >= size)) {
    throw InvalidArgument(text(name_of(call.kind), ": ", is_message(call) ? "the other rank" : "root", " is ",
                               call.peer, "; the group has ranks 0 to ", size - 1));
  }
  if (is_message(call) && at_root) {
    throw InvalidArgument(text(name_of(call.kind), ": rank ", rank, " names itself; nothing is sent to oneself"));
  }
  require_memory(call, call.input);
  require_memory(call, call.output);
  require_dtype(call);
  if (is_reduction(call.kind)) require_operator(call);
  require_length(call, call.counts, size);
  require_length(call, call.output_counts, size);
  switch (call.kind) {
    case Kind::all_reduce:
    case Kind::broadcast:
      require_count(call, "output", call.output, call.input.count);
      if (call.input.data != call.output.data) {
        throw InvalidArgument(text(name_of(call.kind), ": input and output differ; it works in place"));
      }
      break;
    case Kind::reduce:
      if (at_root) require_count(call, "output", call.output, call.input.count);
      break;
    case Kind::all_gather: require_parts(call, "output", call.output, call.input, rank, size, true, true); break;
    case Kind::gather: require_parts(call, "output", call.output, call.input, rank, size, at_root, true); break;
    case Kind::scatter: require_parts(call, "input", call.input, call.output, rank, size, at_root, true); break;
    case Kind::reduce_scatter: require_parts(call, "input", call.input, call.output, rank, size, true, true); break;
    case Kind::all_to_all:
      if (call.counts.empty() != call.output_counts.empty()) {
        throw InvalidArgument("all_to_all: counts are given for one side only; give both or none");
      }
      if (call.counts.empty()) {
        require_count(call, "output", call.output, call.input.count);
        require_count(call, "input", call.input,
                      call.input.count / static_cast<std::size_t>(size) * static_cast<std::size_t>(size));
      } else {
        require_count(call, "input", call.input, sum(call.counts));
        require_count(call, "output", call.output, sum(call.output_counts));
      }
      break;
    default: break;
  }
}

Signature signature_of(const Call& call) {
  std::uint64_t shape = call.kind == Kind::scatter ? call.output.count : call.input.count;
  if (call.kind == Kind::all_to_all && !call.counts.empty()) shape = 0;
  if (call.kind != Kind::all_to_all && !call.counts.empty()) {
    shape = 0x9e3779b97f4a7c15;
    for (const auto count : call.counts) shape = mix(shape, count);
    shape |= Signature::kCounts;
  }
  return {.kind = call.kind,
          .dtype = call.input.dtype,
          .op = is_reduction(call.kind) ? call.op : ReduceOp::sum,
          .is_on_gpu = is_on_gpu(call),
          .peer = has_root(call.kind) ? call.peer : 0,
          .shape = shape & Signature::kShape,
          .purpose = call.purpose.hash()};
}

std::string Signature::describe() const {
  std::string words = name_of(kind);
  const std::uint64_t elements = shape;
  if ((elements & kCounts) != 0) {
    words += text(" of ", name_of(dtype), " by counts (hash ", elements % 0x10000, ")");
  } else if (kind != Kind::barrier) {
    words += text(" of ", elements, " x ", name_of(dtype));
  }
  if (is_on_gpu) words += " on a GPU";
  if (is_reduction(kind)) words += text(", ", name_of(op));
  if (has_root(kind)) words += text(", root ", peer);
  if (purpose != 0) words += text(", for ", Purpose::of_hash(static_cast<std::uint32_t>(purpose)).words());
  return words;
}

SignatureWords pack(const Signature& signature, std::uint32_t sequence) {
  return {static_cast<std::uint64_t>(signature.kind) | static_cast<std::uint64_t>(signature.dtype) << 4 |
              static_cast<std::uint64_t>(signature.op) << 8 | static_cast<std::uint64_t>(signature.is_on_gpu) << 11 |
              static_cast<std::uint64_t>(signature.peer & 0xfffff) << 12 | static_cast<std::uint64_t>(sequence) << 32,
          signature.shape | static_cast<std::uint64_t>(signature.purpose) << 40};
}

Signature signature_in(const SignatureWords& words) {
  return {.kind = static_cast<Kind>(words[0] & 0xf),
          .dtype = static_cast<DType>(words[0] >> 4 & 0xf),
          .op = static_cast<ReduceOp>(words[0] >> 8 & 0x7),
          .is_on_gpu = (words[0] >> 11 & 1) != 0,
          .peer = static_cast<std::int32_t>(words[0] >> 12 & 0xfffff),
          .shape = words[1] & Signature::kShape,
          .purpose = words[1] >> 40};
}

void throw_calls_differ(int rank_a, const Signature& a, int rank_b, const Signature& b) {
  throw InvalidArgument(text("the ranks' calls differ: rank ", rank_a, " calls ", a.describe(), ", rank ", rank_b,
                             " calls ", b.describe()));
}

Slice even_slice(std::size_t count, DType dtype, int rank, int size) {
  const std::size_t line = 64 / size_of(dtype);
  const std::size_t lines = (count + line - 1) / line;
  const auto edge = [&](int r) {
    return std::min(count, lines * static_cast<std::size_t>(r) / static_cast<std::size_t>(size) * line);
  };
  return {edge(rank), edge(rank + 1)};
}

Slice share_of(const Counts& counts, std::size_t each, int rank) {
  const auto index = static_cast<std::size_t>(rank);
  if (counts.empty()) return {index * each, (index + 1) * each};
  const auto begin = std::accumulate(counts.begin(), counts.begin() + rank, std::size_t{0});
  return {begin, begin + counts[index]};
}

std::vector<Transfer> transfers_of(const Call& call, int rank, int size, std::span<const std::size_t> all_counts) {
  const auto element = size_of(call.input.dtype);
  std::vector<Transfer> transfers;
  const auto add = [&](int from, std::size_t at, std::size_t into, std::size_t elements) {
    if (elements > 0) transfers.push_back({from, at * element, into * element, elements * element});
  };
  const auto gather = [&] {
    for (int r = 0; r < size; ++r) {
      const auto share = share_of(call.counts, call.input.count, r);
      add(r, 0, share.begin, share.count());
    }
  };
  switch (call.kind) {
    case Kind::broadcast:
      if (rank != call.peer) add(call.peer, 0, 0, call.output.count);
      break;
    case Kind::all_gather: gather(); break;
    case Kind::gather:
      if (rank == call.peer) gather();
      break;
    case Kind::scatter:
      add(call.peer, share_of(call.counts, call.output.count, rank).begin, 0, call.output.count);
      break;
    case Kind::all_to_all: {
      const auto each = call.input.count / static_cast<std::size_t>(size);
      std::size_t into = 0;
      for (int r = 0; r < size; ++r) {
        const Counts row(all_counts.begin() + (all_counts.empty() ? 0 : r * size),
                         all_counts.begin() + (all_counts.empty() ? 0 : (r + 1) * size));
        const auto part = share_of(row, each, rank);
        add(r, part.begin, into, part.count());
        into += part.count();
      }
      break;
    }
    default: break;
  }
  return transfers;
}

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace lockstep::collective
