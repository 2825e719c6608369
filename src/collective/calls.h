// A Call without running it: whether it is valid, what it transfers, and its description.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "lockstep/collective/group.h"
#include "lockstep/collective/purpose.h"

namespace lockstep::collective {

// A call between two ranks; the others are collective.
inline bool is_message(const Call& call) { return call.kind == Call::Kind::send || call.kind == Call::Kind::recv; }

bool is_reduction(Call::Kind kind);

// Returns the device of the call's buffers. An empty buffer in host memory counts as on the other one's device.
MemoryDevice device_of(const Call& call);
inline bool is_on_gpu(const Call& call) { return device_of(call).type != MemoryDevice::Type::host; }

// Throws InvalidArgument where the call is wrong on this rank alone. Its root or peer is out of range, its buffers are
// too small, of another dtype or on two devices, or its counts do not fit.
void check_call(const Call& call, int rank, int size);

// All ranks' calls must have these in common.
struct Signature {
  Call::Kind kind{};
  DType dtype{};
  ReduceOp op{};
  bool is_on_gpu = false;
  std::int32_t peer = 0;
  std::uint64_t shape : 40 =
      0;  // elements where all ranks have equally many; with counts, their hash and the bit kCounts
  std::uint64_t purpose : 24 = 0;

  static constexpr std::uint64_t kShape = (std::uint64_t{1} << 40) - 1;
  static constexpr std::uint64_t kCounts = std::uint64_t{1} << 39;
  static_assert(Purpose::kBits == 24);

  bool operator==(const Signature&) const = default;
  std::string describe() const;  // "all_reduce of 5 x float32, sum, for bucket 1"
};
Signature signature_of(const Call& call);

// A signature as it is sent, with the call's sequence number.
//
//   bits of word 0: kind 0-3 | dtype 4-7 | operator 8-10 | on a GPU 11 | root or peer 12-31 | sequence 32-63
//   bits of word 1: shape 0-39 | purpose 40-63
using SignatureWords = std::array<std::uint64_t, 2>;
SignatureWords pack(const Signature& signature, std::uint32_t sequence = 0);
Signature signature_in(const SignatureWords& words);
inline std::uint32_t sequence_in(const SignatureWords& words) { return static_cast<std::uint32_t>(words[0] >> 32); }

[[noreturn]] void throw_calls_differ(int rank_a, const Signature& a, int rank_b, const Signature& b);

// Runs the operations that make up `call`. DeadlineExceeded then names `call`, the only one that its caller knows.
template <class Act>
auto on_behalf_of(const Call& call, const Act& act) {
  try {
    return act();
  } catch (const DeadlineExceeded& error) {
    throw DeadlineExceeded(name_of(call.kind), error.waited_for(), error.ranks());
  }
}

// Elements [begin, end).
struct Slice {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t count() const { return end - begin; }
};

// Slice `rank` of `count` elements, cut at whole cache lines so that no two ranks write one line.
Slice even_slice(std::size_t count, DType dtype, int rank, int size);

// The elements that rank `rank` sends or receives in a call with counts; `each` for every rank where there are none.
Slice share_of(const Counts& counts, std::size_t each, int rank);

// Part of rank `from`'s input that comes to this rank's output; in bytes.
struct Transfer {
  int from;
  std::size_t at;
  std::size_t into;
  std::size_t bytes;
};

// Returns the transfers of broadcast, all_gather, gather, scatter or all_to_all. `all_counts`: of an all_to_all with
// counts, [from * size + to].
std::vector<Transfer> transfers_of(const Call& call, int rank, int size, std::span<const std::size_t> all_counts = {});

inline std::byte* bytes_of(const Buffer& buffer) { return static_cast<std::byte*>(buffer.data); }
inline const std::byte* bytes_of(const ConstBuffer& buffer) { return static_cast<const std::byte*>(buffer.data); }

// memcpy that also accepts zero bytes and equal pointers.
void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes);

// The purpose of an exchange in backward that belongs to an exchange in forward. The result has another number, and the
// words of `forward` after "the backward of". Nothing is named, so steps may call this.
Purpose backward_of(Purpose forward);

}  // namespace lockstep::collective
