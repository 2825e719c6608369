#include "transport/shared_space.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/shared_heap.h"

namespace lockstep::transport {
namespace {

// A waiting rank looks this often whether the others are alive, and whether somebody failed the group.
constexpr std::chrono::milliseconds kLongestSleep(20);

// An operation is done with the others' buffers long before this.
constexpr std::chrono::seconds kLongestWork(10);

std::size_t count(int ranks) { return static_cast<std::size_t>(ranks); }

}  // namespace

std::size_t SpaceLayout::control_blocks_at() const { return pages(sizeof(SpaceHeader)); }
std::size_t SpaceLayout::staging_slots_at() const {
  return control_blocks_at() + pages(count(ranks) * sizeof(ControlBlock));
}
std::size_t SpaceLayout::mailboxes_at() const { return staging_slots_at() + count(ranks) * pages(staging_slot_bytes); }
std::size_t SpaceLayout::total_bytes() const {
  return mailboxes_at() + count(ranks) * count(ranks) * pages(mailbox_bytes);
}

FileDescriptor make_memory_file() {
  FileDescriptor memfd(memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memfd.open() || fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
    throw IoError(text("cannot make shared memory: ", std::strerror(errno)));
  }
  return memfd;
}

bool cannot_shrink(int memfd) {
  const int seals = fcntl(memfd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

// Checks the limit first: a file that grows beyond it raises SIGXFSZ, which ends the process.
std::string problem_with_growing(int memfd, std::size_t bytes) {
  struct stat status {};
  if (fstat(memfd, &status) == 0 && static_cast<std::size_t>(status.st_size) >= bytes) return "";
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes) {
    return text("files of this process may have ", limit.rlim_cur, " bytes (ulimit -f)");
  }
  return ftruncate(memfd, static_cast<off_t>(bytes)) == 0 ? "" : std::strerror(errno);
}

std::string problem_with_mapping(std::size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return text("no ", bytes, " bytes of addresses are left: ", std::strerror(errno));
  munmap(memory, bytes);
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes) {
    return text(bytes, " bytes are needed, and files of this process may have ", limit.rlim_cur, " (ulimit -f)");
  }
  return "";
}

SharedSpace::SharedSpace(const SpaceLayout& layout, int memfd) : layout_(layout) {
  const int flags = memfd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* memory = mmap(nullptr, layout_.total_bytes(), PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, memfd, 0);
  if (memory == MAP_FAILED) {
    throw IoError(text("cannot map ", layout_.total_bytes(), " bytes of shared memory: ", std::strerror(errno)));
  }
  begin_ = static_cast<std::byte*>(memory);
}

SharedSpace::~SharedSpace() { munmap(begin_, layout_.total_bytes()); }

FileDescriptor SharedSpace::make_memfd(const SpaceLayout& layout) {
  auto memfd = make_memory_file();
  const auto problem = problem_with_growing(memfd.get(), layout.total_bytes());
  if (!problem.empty()) throw IoError(text("cannot make shared memory of ", layout.total_bytes(), " bytes: ", problem));
  return memfd;
}

ControlBlock& SharedSpace::control_block(int rank) const {
  return reinterpret_cast<ControlBlock*>(begin_ + layout_.control_blocks_at())[rank];
}

std::byte* SharedSpace::staging_slot(int rank) const {
  return begin_ + layout_.staging_slots_at() + count(rank) * pages(layout_.staging_slot_bytes);
}

std::byte* SharedSpace::mailbox(int from, int to) const {
  return begin_ + layout_.mailboxes_at() + count(from * layout_.ranks + to) * pages(layout_.mailbox_bytes);
}

SpaceMember::SpaceMember(std::shared_ptr<SharedSpace> space, int rank, std::int64_t generation, SpinThenBlock spin,
                         std::vector<FileDescriptor> pidfds, std::vector<int> names)
    : space_(std::move(space)),
      rank_(rank),
      generation_(generation),
      spin_(spin),
      pidfds_(std::move(pidfds)),
      names_(std::move(names)) {}

SpaceMember::~SpaceMember() { space_->control_block(rank_).left.store(1, std::memory_order_release); }

bool SpaceMember::has_left(int rank) const {
  return space_->control_block(rank).left.load(std::memory_order_acquire) != 0;
}

bool SpaceMember::is_dead(int rank) const {
  if (count(rank) >= pidfds_.size() || !pidfds_[count(rank)].open()) return false;
  pollfd pidfd{pidfds_[count(rank)].get(), POLLIN, 0};
  return poll(&pidfd, 1, 0) > 0;
}

void SpaceMember::look(const char* operation, bool also_left) {
  check();
  for (int r = 0; r < size(); ++r) {
    const bool left = r != rank_ && has_left(r);
    if (r != rank_ && (left ? also_left : is_dead(r))) give_up(lost(r, left, operation));
  }
}

ShownNumbers::Told SpaceMember::told() {
  Told told{{}, std::vector<bool>(count(size()), true)};
  for (int r = 0; r < size(); ++r) told.numbers.push_back(space_->control_block(r).number);
  return told;
}

Failure SpaceMember::lost(int rank, bool left, const char* operation) const {
  const auto how = text(left ? "it left the group" : "its process ended", " during ", operation);
  return Failure::peer_lost(name_of(rank_), name_of(rank), how);
}

std::optional<SpaceMember::Trouble> SpaceMember::trouble(std::span<const int> late, Deadline deadline,
                                                         const char* operation) const {
  if (space_->header().failure_state.load(std::memory_order_acquire) != 0) return Trouble{first_failure()};
  for (const int r : late) {
    const bool left = has_left(r);
    if (left || is_dead(r)) return Trouble{lost(r, left, operation), r};
  }
  if (!deadline.passed()) return std::nullopt;
  return Trouble{this->late(late, deadline, operation)};
}

Failure SpaceMember::late(std::span<const int> late, Deadline deadline, const char* operation) const {
  std::vector<int> names;
  for (const int r : late) names.push_back(name_of(r));
  return Failure::deadline(name_of(rank_), names, deadline.waited().count(), operation);
}

void SpaceMember::block_while(Signal& signal, std::uint32_t seen, Deadline deadline) const {
  signal.sleep_while(seen, std::min<std::chrono::nanoseconds>(deadline.time() - Deadline::Clock::now(), kLongestSleep));
}

void SpaceMember::give_up(const Failure& failure) {
  fail(failure);
  raise();
}

void SpaceMember::fail(const Failure& failure) {
  auto& header = space_->header();
  std::uint32_t none = 0;
  if (!header.failure_state.compare_exchange_strong(none, 1)) return;
  header.failure = failure;
  header.failure_state.store(2, std::memory_order_release);
}

Failure SpaceMember::first_failure() const {
  const auto& header = space_->header();
  // A reporter that is killed while it writes leaves the state 1 forever.
  const auto written = Deadline::after(std::chrono::seconds(1));
  while (header.failure_state.load(std::memory_order_acquire) != 2) {
    if (written.passed()) return Failure::aborted(name_of(rank_), "by a rank that ended while it did so");
    yield_processor();
  }
  return header.failure;
}

// Either this rank sees the failure that another one has set, or the other one sees here that this rank is active.
SpaceMember::RemoteAccess::RemoteAccess(const SpaceMember& member)
    : remote_access_(member.space().control_block(member.rank()).remote_access) {
  remote_access_.store(1, std::memory_order_seq_cst);
  if (member.space().header().failure_state.load(std::memory_order_seq_cst) == 0) return;
  remote_access_.store(0, std::memory_order_release);
  member.raise();
}

void SpaceMember::wait_until_left_alone() const {
  const bool threads = std::none_of(pidfds_.begin(), pidfds_.end(), [](const auto& pidfd) { return pidfd.open(); });
  const auto most = Deadline::after(kLongestWork);
  for (int r = 0; threads && r < size(); ++r) {
    while (r != rank_ && space_->control_block(r).remote_access.load(std::memory_order_seq_cst) != 0 &&
           !most.passed()) {
      yield_processor();
    }
  }
}

void SpaceMember::raise() const {
  wait_until_left_alone();
  first_failure().raise(name_of(rank_), generation_);
}

}  // namespace lockstep::transport
