// Memory that the ranks of one host share, how they wait in it, and how they learn that one of them is gone.
//
// Ranks are threads of one process (private memory) or processes (a memfd). A memfd has no name: the kernel frees it
// when the last process has ended, in whatever way.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/failure.h"
#include "base/file.h"
#include "lockstep/base/deadline.h"
#include "transport/connections.h"
#include "transport/shown_numbers.h"
#include "transport/signal.h"

namespace lockstep::transport {

// How the memory is divided; equal on all ranks. Untouched pages cost nothing.
//
//   header | control blocks: one a rank | staging slots: one a rank | mailboxes: one an ordered pair
struct SpaceLayout {
  int ranks = 1;
  std::size_t staging_slot_bytes = 0;
  std::size_t mailbox_bytes = 0;

  std::size_t control_blocks_at() const;
  std::size_t staging_slots_at() const;
  std::size_t mailboxes_at() const;
  std::size_t total_bytes() const;
};

inline constexpr int kMostRanksOfAHost = 250;

// Every rank has this beside its staging slot. `wake_up` is signalled when a mailbox of this rank has changed.
struct alignas(64) ControlBlock {
  static constexpr std::size_t kMostSegments = 64;

  Signal wake_up;
  std::atomic<std::uint32_t> left;
  std::atomic<std::uint32_t> remote_access;  // it reads or writes the others' buffers
  std::atomic<std::int64_t> number;          // that this rank shows

  // The memory that this rank allocates (shared_heap.h): the number of segments, and where each ends in the file.
  // `mapped[r]`: how many of rank r's segments this rank has mapped.
  alignas(64) std::atomic<std::uint32_t> segments;
  std::atomic<std::uint64_t> segment_ends[kMostSegments];
  alignas(64) std::atomic<std::uint8_t> mapped[kMostRanksOfAHost];
};

struct SpaceHeader {
  std::atomic<std::uint32_t> failure_state;  // 0 none, 1 being written, 2 readable
  Failure failure;
};

// make_memory_file: a memory file that can grow and not shrink, so that mapped bytes stay valid. cannot_shrink: whether
// a file is such. problem_with_growing: why it cannot have so many bytes; empty where it can. Throws IoError.
FileDescriptor make_memory_file();
bool cannot_shrink(int memfd);
std::string problem_with_growing(int memfd, std::size_t bytes);

// Says why this process cannot share so many bytes under its limits; empty where it can.
std::string problem_with_mapping(std::size_t bytes);

// The mapping; shared by all ranks that are threads of one process.
class SharedSpace {
 public:
  // Private memory.
  explicit SharedSpace(const SpaceLayout& layout) : SharedSpace(layout, -1) {}
  // Maps `memfd`, which may be closed afterwards. Throws IoError.
  SharedSpace(const SpaceLayout& layout, int memfd);
  ~SharedSpace();
  SharedSpace(const SharedSpace&) = delete;
  SharedSpace& operator=(const SharedSpace&) = delete;

  // A file of zeros of the layout's size. Throws IoError.
  static FileDescriptor make_memfd(const SpaceLayout& layout);

  const SpaceLayout& layout() const { return layout_; }
  std::byte* begin() const { return begin_; }
  SpaceHeader& header() const { return *reinterpret_cast<SpaceHeader*>(begin_); }
  ControlBlock& control_block(int rank) const;
  std::byte* staging_slot(int rank) const;
  std::byte* mailbox(int from, int to) const;

 private:
  const SpaceLayout layout_;
  std::byte* begin_ = nullptr;
};

// One rank's place in a space. Its thread waits; any thread may call fail and check.
class SpaceMember final : public ShownNumbers {
 public:
  // `pidfds[r]`: a pidfd of rank r's process, or closed where it is this process. `names[r]`: the number by which
  // failures name it; its rank by default. The destructor announces that this rank has left.
  SpaceMember(std::shared_ptr<SharedSpace> space, int rank, std::int64_t generation, SpinThenBlock spin,
              std::vector<FileDescriptor> pidfds = {}, std::vector<int> names = {});
  ~SpaceMember() override;

  SharedSpace& space() const { return *space_; }
  std::shared_ptr<SharedSpace> shared_space() const { return space_; }
  int rank() const { return rank_; }
  int size() const { return space_->layout().ranks; }
  const SpinThenBlock& spin() const { return spin_; }
  std::int64_t generation() const { return generation_; }

  // Returns when signal_of(r) has reached `target` for every other rank r; raises the failure that comes first.
  template <class SignalOf>
  void wait_for_all(const SignalOf& signal_of, std::uint32_t target, Deadline deadline, const char* operation) {
    for (int r = 0; r < size(); ++r) {
      if (r == rank_) continue;
      Signal& signal = signal_of(r);
      if (spin_until(spin_, [&] { return signal.reached(target); })) continue;
      while (!signal.reached(target)) {
        std::vector<int> late;
        for (int other = r; other < size(); ++other) {
          if (other != rank_ && !signal_of(other).reached(target)) late.push_back(other);
        }
        const auto seen = signal.value();
        const auto wrong = trouble(late, deadline, operation);
        // A rank that has done its part may leave, or fail for reasons of its own: what it did counts.
        const bool excused =
            signal.reached(target) || (wrong && wrong->gone >= 0 && signal_of(wrong->gone).reached(target));
        if (wrong && !excused) give_up(wrong->failure);
        if (!excused) block_while(signal, seen, deadline);
      }
    }
  }

  // The reason why a wait for `late` cannot go on: a failure, one of them is gone, or the deadline has passed.
  struct Trouble {
    Failure failure;
    int gone = -1;
  };
  std::optional<Trouble> trouble(std::span<const int> late, Deadline deadline, const char* operation) const;

  // DeadlineExceeded for a wait for ranks `late`.
  Failure late(std::span<const int> late, Deadline deadline, const char* operation) const;

  // Fails the group and raises the first failure.
  [[noreturn]] void give_up(const Failure& failure);

  // Sleeps while `signal` has the value `seen`, at most until the next check for trouble is due.
  void block_while(Signal& signal, std::uint32_t seen, Deadline deadline) const;

  // While it lives this rank may access the others' buffers directly. Ranks that are threads wait for its end before
  // they raise a failure, after which a buffer may be freed. Processes need not: they access only the shared space.
  class RemoteAccess {
   public:
    explicit RemoteAccess(const SpaceMember& member);  // raises the first failure
    ~RemoteAccess() { remote_access_.store(0, std::memory_order_release); }
    RemoteAccess(const RemoteAccess&) = delete;
    RemoteAccess& operator=(const RemoteAccess&) = delete;

   private:
    std::atomic<std::uint32_t>& remote_access_;
  };

  // Raises the first failure, or PeerLost, during `operation`, for a rank whose process ended before it left, or, with
  // `also_left`, that has left.
  void look(const char* operation, bool also_left);

  void show(std::int64_t number) override { space_->control_block(rank_).number = number; }
  void ask() override {}
  void answer() override {}
  Told told() override;

  // The first failure is kept, on all ranks.
  void fail(const Failure& failure);

  // Raises the first failure.
  void check() const {
    if (space_->header().failure_state.load(std::memory_order_acquire) != 0) [[unlikely]]
      raise();
  }

 private:
  bool has_left(int rank) const;
  bool is_dead(int rank) const;  // its process has ended
  Failure lost(int rank, bool left, const char* operation) const;
  Failure first_failure() const;
  int name_of(int rank) const { return names_.empty() ? rank : names_[static_cast<std::size_t>(rank)]; }
  [[noreturn]] void raise() const;
  void wait_until_left_alone() const;

  const std::shared_ptr<SharedSpace> space_;
  const int rank_;
  const std::int64_t generation_;
  const SpinThenBlock spin_;
  const std::vector<FileDescriptor> pidfds_;
  const std::vector<int> names_;
};

// How the processes of a host come to share a space. Rank 0 makes the memory; `layout` must be equal on all ranks. Rank
// 0 hands the memory to processes of its user, over a Unix socket with a random name in the abstract namespace. Each
// rank gets a pidfd of every other. Collective. `names` are SpaceMember's. Throws ClusterError, and DeadlineExceeded
// naming the ranks that did not come.
struct SharedRendezvous {
  std::unique_ptr<SpaceMember> member;
  std::vector<FileDescriptor> heaps;  // [rank]: a file of memory that the rank alone lets grow
};
SharedRendezvous rendezvous_in_shared_memory(int rank, const SpaceLayout& layout, std::int64_t generation,
                                             SpinThenBlock spin, const std::vector<int>& names,
                                             const AllGather& all_gather, Deadline deadline);

}  // namespace lockstep::transport
