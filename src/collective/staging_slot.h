// A rank shows this to the others of its host: its call, small inputs, and windows through which large ones pass.
#pragma once

#include <cstddef>
#include <cstdint>

#include "collective/calls.h"
#include "transport/signal.h"

namespace lockstep::collective {

// One call, with its sequence number as the signal that it may be read. Of a call of a few bytes the first cache line
// has everything, so that seeing it costs one transfer.
//
//   line 0: sequence 8 | signature 16 | input_bytes 8 | input_at 8 | output_at 8 | tiny 16
//   line 1: small
struct alignas(64) CallDescriptor {
  static constexpr std::size_t kTiny = 16;
  static constexpr std::size_t kSmall = 8 * 1024;
  static constexpr std::int64_t kPrivate = -1;  // of a buffer that the others cannot see

  transport::Signal sequence;
  Signature signature;
  std::uint64_t input_bytes;
  std::int64_t input_at;  // where every rank finds it: an address, or an offset into the shared space
  std::int64_t output_at;
  std::byte tiny[kTiny];
  alignas(64) std::byte small[kSmall];

  std::byte* payload() { return input_bytes <= kTiny ? tiny : small; }
};

// Calls are posted to two places in turn: a rank cannot come to the call after next before all have seen this one.
struct StagingSlot {
  static constexpr std::size_t kWindow = 2 * 1024 * 1024;

  CallDescriptor descriptors[2];
  alignas(64) transport::Signal done;    // counts the meetings within calls
  alignas(64) std::byte input[kWindow];  // of large calls with private buffers: what the others need of this input
  alignas(64) std::byte sum[kWindow];    // this rank's slice of the sums
};

}  // namespace lockstep::collective
