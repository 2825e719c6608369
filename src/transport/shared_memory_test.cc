// Memory that the processes of a host share: what is mapped is checked, and grows with what is used.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <thread>

#include "base/child_process_testing.h"
#include "base/expect_says_testing.h"
#include "base/text.h"
#include "transport/connections.h"
#include "transport/shared_heap.h"
#include "transport/shared_space.h"

namespace lockstep::transport {
namespace {

constexpr uid_t kAnotherUser = 65534;
const SpaceLayout kLayout{.ranks = 2, .staging_slot_bytes = 8192, .mailbox_bytes = 4096};

Deadline within(double seconds) { return Deadline::after(std::chrono::duration<double>(seconds)); }

int listener_named(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const int listener = ::socket(AF_UNIX, SOCK_STREAM, 0);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (::bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(listener, 8) != 0) return -1;
  return listener;
}

// Returns the text that rank 1 gets of a rank 0 that is served at `name`.
std::string guest_of(const std::string& name) {
  return message_of<ClusterError>([&] {
    rendezvous_in_shared_memory(
        1, kLayout, 0, {}, {0, 1},
        [&](const std::string& mine) {
          return std::vector<std::string>{name, mine};
        },
        within(5));
  });
}

// A rank 0 that gives one guest this layout, a file of so many bytes and so many other descriptors.
std::string guest_of_one_who_gives(SpaceLayout layout, std::size_t bytes, std::size_t others, bool sealed = true) {
  const auto name = "lockstep-test-" + random_name();
  const int listener = listener_named(name);
  EXPECT_GE(listener, 0);
  std::jthread host([&] {
    const int guest = ::accept(listener, nullptr, nullptr);
    char hello[64], control[CMSG_SPACE(8 * sizeof(int))];
    iovec hello_part{hello, sizeof hello};
    msghdr received{};
    received.msg_iov = &hello_part;
    received.msg_iovlen = 1;
    received.msg_control = control;
    received.msg_controllen = sizeof control;
    ::recvmsg(guest, &received, 0);
    const int memfd = memfd_create("test", MFD_ALLOW_SEALING);
    EXPECT_EQ(ftruncate(memfd, static_cast<off_t>(bytes)), 0);
    EXPECT_EQ(fcntl(memfd, F_ADD_SEALS, sealed ? F_SEAL_SHRINK : F_SEAL_WRITE), 0);
    std::vector<int> given(1 + others, memfd);
    std::vector<char> room(CMSG_SPACE(given.size() * sizeof(int)));
    iovec part{&layout, sizeof layout};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = room.data();
    message.msg_controllen = room.size();
    auto* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(given.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), given.data(), given.size() * sizeof(int));
    EXPECT_GT(::sendmsg(guest, &message, 0), 0);
    ::close(guest);
    ::close(memfd);
  });
  const auto said = guest_of(name);
  ::close(listener);
  return said;
}

TEST(SharedMemory, AnotherUsersIsNotMapped) {
  const auto name = "lockstep-test-" + random_name();
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  ChildProcess other([&]() -> std::string {
    if (::setuid(kAnotherUser) != 0) return "cannot become another user";
    const int listener = listener_named(name);
    if (::write(ready[1], "x", 1) != 1) return "no pipe";
    ::accept(listener, nullptr, nullptr);
    return "asked";
  });
  ::close(ready[1]);
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  expect_says(guest_of(name), "another user's process");
}

TEST(SharedMemory, ALayoutThatIsNotTheRanksOwnIsRefused) {
  const auto whole = kLayout.total_bytes();
  auto many = kLayout;
  many.ranks = 3;
  expect_says(guest_of_one_who_gives(many, many.total_bytes(), 3), "it is for 3 ranks, not 2");
  auto negative = kLayout;
  negative.ranks = -1;
  expect_says(guest_of_one_who_gives(negative, whole, 2), "it is for -1 ranks");
  auto other_slots = kLayout;
  other_slots.staging_slot_bytes = std::size_t{1} << 60;
  expect_says(guest_of_one_who_gives(other_slots, whole, 2), "divided in another way");
  expect_says(guest_of_one_who_gives(kLayout, whole - 4096, 2), "another size than it says");
  expect_says(guest_of_one_who_gives(kLayout, whole, 2, false), "another size than it says");
  expect_says(guest_of_one_who_gives(kLayout, whole, 1), "descriptors came with it");
}

// Two ranks in one process, each with its view.
struct Pair {
  explicit Pair(std::size_t most = 0) : space(std::make_shared<SharedSpace>(kLayout)) {
    for (int r = 0; r < 2; ++r) files.push_back(make_memory_file());
    for (int r = 0; r < 2; ++r) {
      std::vector<FileDescriptor> own;
      for (const auto& file : files) own.emplace_back(::dup(file.get()));
      ranks.push_back(std::make_unique<SharedHeap>(space, r, std::move(own), most));
    }
  }
  SharedHeap& zero() { return *ranks[0]; }
  SharedHeap& one() { return *ranks[1]; }

  std::shared_ptr<SharedSpace> space;
  std::vector<FileDescriptor> files;
  std::vector<std::unique_ptr<SharedHeap>> ranks;
};

TEST(SharedHeap, GrowsAndIsSeenByTheOther) {
  Pair pair;
  std::vector<std::byte*> taken;
  for (const std::size_t bytes :
       {std::size_t{1}, std::size_t{1} << 20, std::size_t{40} << 20, std::size_t{100} << 20}) {
    taken.push_back(pair.zero().take(bytes));
    std::memset(taken.back(), static_cast<int>(taken.size()), bytes);
    const bool in_a_new_segment = bytes != std::size_t{1} << 20;  // which the other has not mapped
    EXPECT_EQ(pair.zero().offset_of(taken.back(), bytes) == -1, in_a_new_segment);
    pair.one().map_new();
    const auto place = pair.zero().offset_of(taken.back(), bytes);
    ASSERT_GE(place, 0);
    const auto* const there = pair.one().at(0, place, bytes);
    EXPECT_NE(there, taken.back());
    EXPECT_EQ(static_cast<std::size_t>(there[bytes - 1]), taken.size());
    EXPECT_EQ(pair.zero().at(0, place, bytes), taken.back());
  }
  pair.zero().give_back(taken[1]);
  EXPECT_EQ(pair.zero().take(1 << 20), taken[1]);
  EXPECT_EQ(taken[1][0], std::byte{});
}

TEST(SharedHeap, PlacesOutsideOfWhatWasGivenOutAreErrors) {
  Pair pair;
  auto* const memory = pair.zero().take(4096);
  pair.one().map_new();
  const auto place = pair.zero().offset_of(memory, 4096);
  EXPECT_NO_THROW(pair.one().at(0, place, 4096));
  constexpr std::size_t kAll = std::size_t{16} << 20;
  for (const auto& [at, bytes] : std::vector<std::pair<std::int64_t, std::size_t>>{{-1, 1},
                                                                                   {INT64_MIN, 8},
                                                                                   {INT64_MAX, 8},
                                                                                   {place, kAll + 1},
                                                                                   {kAll, 1},
                                                                                   {kAll - 8, 9},
                                                                                   {0, ~std::size_t{0}}}) {
    expect_says(message_of<ClusterError>([&, at = at, bytes = bytes] { pair.one().at(0, at, bytes); }),
                "where it shares no memory");
  }
  expect_says(message_of<ClusterError>([&] { pair.one().at(1, 0, 8); }), "rank 1 showed");
}

// Memory after the end of a file would end the process that touches it.
TEST(SharedHeap, ASegmentThatIsNotThereIsNotMapped) {
  Pair pair;
  pair.space->control_block(0).segment_ends[0] = std::size_t{1} << 40;
  pair.space->control_block(0).segments = 1;
  pair.one().map_new();
  EXPECT_EQ(pair.space->control_block(1).mapped[0], 0);
  EXPECT_THROW(pair.one().at(0, 0, 8), ClusterError);
}

TEST(SharedHeap, ABoundIsNamed) {
  Pair pair(std::size_t{20} << 20);
  EXPECT_NE(pair.zero().take(std::size_t{15} << 20), nullptr);
  expect_says(message_of<InvalidArgument>([&] { pair.zero().take(std::size_t{8} << 20); }), "larger heap_bytes");
}

}  // namespace
}  // namespace lockstep::transport
