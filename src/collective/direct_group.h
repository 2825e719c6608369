// The backend for ranks that share memory: threads of one process, or processes of one host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "collective/backend.h"
#include "collective/calls.h"
#include "transport/memory_channels.h"
#include "transport/shared_space.h"
#include "transport/signal.h"

namespace lockstep::collective {

// A rank shows this to the others of its host: its call, small inputs, and windows through which large ones pass.

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

// In every operation a rank posts its call, waits for the others' calls, and reads what it needs from their memory:
//   small   the inputs came with the descriptors, and each rank computes its own result;
//   direct  all ranks can access all buffers: each reduces one slice for all, and waits for the others;
//   staged  otherwise: the same, through windows of shared memory.
class DirectGroup : public GroupBackend {
 public:
  // The layout of a space for `ranks` ranks: the sizes of a staging slot and a mailbox.
  static transport::SpaceLayout layout(int ranks);

  explicit DirectGroup(std::shared_ptr<transport::SpaceMember> member);

  int rank() const override { return member_->rank(); }
  int size() const override { return member_->size(); }
  const char* run(const Call& call, Deadline deadline) override;
  const char* exchange(std::span<const Call> calls, Deadline deadline) override;
  std::vector<Memory> allocate_shared(std::size_t bytes, Deadline deadline) override;
  void look(const char* operation, bool also_left) override { member_->look(operation, also_left); }
  transport::ShownNumbers* numbers() override { return member_.get(); }
  void fail(const Failure& failure) override { member_->fail(failure); }

 protected:
  const std::shared_ptr<transport::SpaceMember>& member() const { return member_; }

  // location_of: where the others find a buffer, or CallDescriptor::kPrivate. address_at: where this rank finds `bytes`
  // that another rank posted; throws ClusterError for a location that the other does not share. map_new_segments is
  // called before each call's descriptors are read.
  virtual std::int64_t location_of(const ConstBuffer& buffer) = 0;
  virtual std::byte* address_at(int rank, std::int64_t location, std::size_t bytes) const = 0;
  virtual void map_new_segments() {}

  // A handle of the `bytes` that another rank allocated. The other rank's own is at `memory` there.
  virtual Memory memory_at(int rank, std::int64_t location, std::size_t bytes, const Memory* memory) const = 0;

 private:
  enum class Path { small, direct, staged };

  StagingSlot& staging_slot(int rank) const { return *staging_slots_[static_cast<std::size_t>(rank)]; }
  CallDescriptor& descriptor(int rank) const { return staging_slot(rank).descriptors[posted_ % 2]; }

  Path exchange_descriptors(const Call& call, Deadline deadline);
  void meet_within(const char* operation, Deadline deadline);
  const char* reduce(const Call& call, Deadline deadline);
  void reduce_staged(const Call& call, Deadline deadline);
  const char* pull(const Call& call, Deadline deadline);
  void pull_staged(const Call& call, std::span<const Transfer> transfers, Deadline deadline);

  Slice my_slice(const Call& call) const;
  const std::byte* payload_of(int rank, std::size_t at, std::size_t bytes) const;
  template <class InputOf>
  void reduce_into(const Call& call, std::size_t count, const InputOf& input_of, std::span<void* const> outputs);

  const std::shared_ptr<transport::SpaceMember> member_;
  const std::vector<StagingSlot*> staging_slots_;  // [rank]
  transport::MemoryChannels channels_;
  std::uint32_t posted_ = 0;        // calls
  std::uint32_t synchronized_ = 0;  // synchronizations within calls
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

}  // namespace lockstep::collective
