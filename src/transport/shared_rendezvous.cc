#include "transport/shared_space.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep::transport {
namespace {

// A process may connect and say nothing for so long: it must not keep ranks waiting.
constexpr std::chrono::seconds kForHello(5);

constexpr std::chrono::milliseconds kBetweenCalls(1);

Deadline sooner(Deadline a, Deadline b) { return a.time() < b.time() ? a : b; }

struct Hello {
  std::uint32_t magic = 0x4d454d4c;  // "LMEM"
  std::uint32_t version = 2;
  std::int32_t rank = 0;

  bool same_protocol(const Hello& other) const { return magic == other.magic && version == other.version; }
};

// Calls bind or connect with the address of that name, which is in no folder: its first byte is zero.
int call_with_name(decltype(&connect) call, const FileDescriptor& socket, const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return call(socket.get(), reinterpret_cast<const sockaddr*>(&address), length);
}

FileDescriptor unix_socket() {
  FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.open()) throw ClusterError(text("cannot open a Unix socket: ", std::strerror(errno)));
  return socket;
}

FileDescriptor own_pidfd() {
  FileDescriptor pidfd(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  if (!pidfd.open()) throw ClusterError(text("cannot make a pidfd (Linux 5.3 has them): ", std::strerror(errno)));
  return pidfd;
}

// The arguments of sendmsg and recvmsg for a value and descriptors.
struct Envelope {
  Envelope(void* value, std::size_t bytes, std::size_t descriptors)
      : control(CMSG_SPACE(descriptors * sizeof(int))), part{value, bytes} {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
  }
  Envelope(const Envelope&) = delete;
  Envelope& operator=(const Envelope&) = delete;

  std::vector<char> control;
  iovec part;
  msghdr message{};
};

// One message: the value, and descriptors.
template <class T>
void send_with(const FileDescriptor& socket, T value, const std::vector<int>& descriptors, Deadline deadline) {
  Envelope envelope(&value, sizeof value, descriptors.size());
  auto& message = envelope.message;
  auto* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
  while (sendmsg(socket.get(), &message, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof value)) {
    if (errno == ETOOMANYREFS && !deadline.passed()) {
      std::this_thread::sleep_for(kBetweenCalls);  // too many descriptors of this user are in flight
      continue;
    }
    if (errno != EAGAIN && errno != EINTR)
      throw ClusterError(text("a rank of this host went away: ", std::strerror(errno)));
    if (!wait_for_events(socket.get(), POLLOUT, deadline)) throw DeadlineExceeded("sharing memory", deadline.waited());
  }
}

template <class T>
T receive_with(const FileDescriptor& socket, std::vector<FileDescriptor>& descriptors, Deadline deadline) {
  T value{};
  Envelope envelope(&value, sizeof value, kMostRanksOfAHost + 1);
  auto& message = envelope.message;
  ssize_t count = 0;
  while ((count = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC | MSG_WAITALL)) < 0) {
    if (errno != EAGAIN && errno != EINTR)
      throw ClusterError(text("a rank of this host went away: ", std::strerror(errno)));
    if (!wait_for_events(socket.get(), POLLIN, deadline)) throw DeadlineExceeded("sharing memory", deadline.waited());
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    errno = EMFILE;
    throw ClusterError("this process can have no more descriptors, which shared memory needs: raise ulimit -n");
  }
  for (auto* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_type != SCM_RIGHTS) continue;
    std::vector<int> taken((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(taken.data(), CMSG_DATA(header), taken.size() * sizeof(int));
    for (const int fd : taken) descriptors.emplace_back(fd);
  }
  if (count != static_cast<ssize_t>(sizeof value))
    throw ClusterError("a rank of this host went away while memory was shared");
  return value;
}

bool same_user(const FileDescriptor& socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

// Says why a rank cannot map a layout that it does not expect. With another size of a staging slot everything after the
// slot would be elsewhere, and an access after the end of the file raises SIGBUS.
std::string problem_with(const SpaceLayout& made, const SpaceLayout& expected,
                         const std::vector<FileDescriptor>& given) {
  if (made.ranks != expected.ranks) return text("it is for ", made.ranks, " ranks, not ", expected.ranks);
  if (made.staging_slot_bytes != expected.staging_slot_bytes || made.mailbox_bytes != expected.mailbox_bytes) {
    return "it is divided in another way: do all ranks run the same program?";
  }
  if (given.size() != static_cast<std::size_t>(made.ranks) + 1) {
    return text(given.size(), " descriptors came with it, not ", made.ranks + 1);
  }
  struct stat status {};
  const bool is_there = fstat(given[0].get(), &status) == 0 && cannot_shrink(given[0].get()) &&
                        made.total_bytes() == static_cast<std::size_t>(status.st_size);
  return is_there ? "" : "its file has another size than it says";
}

FileDescriptor listen_at_name(const std::string& name) {
  auto listener = unix_socket();
  if (call_with_name(&bind, listener, name) != 0 || listen(listener.get(), SOMAXCONN) != 0) {
    throw ClusterError(text("cannot listen at a Unix socket: ", std::strerror(errno)));
  }
  return listener;
}

// Rank 0: accepts all other ranks, each with its pidfd and its heap, and hands out the memory and all descriptors.
// Returns the pidfds and the heaps of all, [rank].
std::pair<std::vector<FileDescriptor>, std::vector<FileDescriptor>> welcome(const FileDescriptor& listener,
                                                                            const FileDescriptor& memory,
                                                                            const SpaceLayout& layout,
                                                                            const std::vector<int>& names,
                                                                            Deadline deadline) {
  const auto ranks = static_cast<std::size_t>(layout.ranks);
  std::vector<FileDescriptor> pidfds(ranks), heaps(ranks), guests(ranks);
  pidfds[0] = own_pidfd();
  heaps[0] = make_memory_file();
  const auto missing = [&] {
    std::vector<int> late;
    for (std::size_t r = 1; r < ranks; ++r) {
      if (!guests[r].open()) late.push_back(names[r]);
    }
    return late;
  };
  for (std::size_t come = 1; come < ranks;) {
    try {
      auto guest = accept_from(listener, deadline);
      if (!same_user(guest)) continue;
      std::vector<FileDescriptor> own;  // its pidfd and its heap
      const auto hello = receive_with<Hello>(guest, own, sooner(deadline, Deadline::after(kForHello)));
      const auto rank = static_cast<std::size_t>(hello.rank);
      const bool expected = hello.rank > 0 && rank < ranks && !guests[rank].open();
      if (!hello.same_protocol({}) || !expected || own.size() != 2 || !cannot_shrink(own[1].get())) continue;
      pidfds[rank] = std::move(own[0]);
      heaps[rank] = std::move(own[1]);
      guests[rank] = std::move(guest);
      ++come;
    } catch (const DeadlineExceeded&) {
      if (deadline.passed()) throw DeadlineExceeded("sharing memory", deadline.waited(), missing());
      log_warning("a process that wanted to share memory did not say in time who it is");
    } catch (const ClusterError& error) {
      if (deadline.passed() || errno == EMFILE || errno == ENFILE) throw;
      log_warning(text("a process that wanted to share memory went away: ", error.what()));
    }
  }
  std::vector<int> first{memory.get()}, second;  // the descriptors of the two messages
  for (const auto& pidfd : pidfds) first.push_back(pidfd.get());
  for (const auto& heap : heaps) second.push_back(heap.get());
  for (std::size_t r = 1; r < ranks; ++r) {
    send_with(guests[r], layout, first, deadline);
    send_with(guests[r], layout.ranks, second, deadline);
  }
  return {std::move(pidfds), std::move(heaps)};
}

}  // namespace

SharedRendezvous rendezvous_in_shared_memory(int rank, const SpaceLayout& layout, std::int64_t generation,
                                             SpinThenBlock spin, const std::vector<int>& names,
                                             const AllGather& all_gather, Deadline deadline) {
  if (layout.ranks > kMostRanksOfAHost) {
    throw InvalidArgument(
        text("shared memory is for at most ", kMostRanksOfAHost, " ranks a host, not ", layout.ranks));
  }
  const auto member = [&](std::shared_ptr<SharedSpace> space, std::vector<FileDescriptor> pidfds) {
    pidfds[static_cast<std::size_t>(rank)] = FileDescriptor();  // a rank does not watch itself
    return std::make_unique<SpaceMember>(std::move(space), rank, generation, spin, std::move(pidfds), names);
  };
  if (rank == 0) {
    const auto name = "lockstep-" + random_name();
    const auto memory = SharedSpace::make_memfd(layout);
    const auto listener = listen_at_name(name);
    all_gather(name);
    auto [pidfds, heaps] = welcome(listener, memory, layout, names, deadline);
    return {member(std::make_shared<SharedSpace>(layout, memory.get()), std::move(pidfds)), std::move(heaps)};
  }
  const auto name = all_gather("")[0];
  const auto socket = unix_socket();
  while (call_with_name(&connect, socket, name) != 0) {
    if (errno != EAGAIN && errno != EINTR) {
      throw ClusterError(text("rank 0 cannot be reached over a Unix socket (", std::strerror(errno),
                              "): do these ranks really share a host?"));
    }
    if (deadline.passed()) throw DeadlineExceeded("sharing memory", deadline.waited(), {names[0]});
    yield_processor();  // its queue is full
  }
  if (!same_user(socket)) {
    throw ClusterError("what answers in the place of rank 0 over a Unix socket is another user's process");
  }
  const auto heap = make_memory_file();
  send_with(socket, Hello{.rank = rank}, {own_pidfd().get(), heap.get()}, deadline);
  std::vector<FileDescriptor> given, heaps;
  const auto made = receive_with<SpaceLayout>(socket, given, deadline);
  const auto problem = problem_with(made, layout, given);
  if (!problem.empty()) throw ClusterError("rank 0 cannot share its memory: " + problem);
  receive_with<int>(socket, heaps, deadline);
  const bool safe = std::all_of(heaps.begin(), heaps.end(), [](const auto& file) { return cannot_shrink(file.get()); });
  if (heaps.size() != static_cast<std::size_t>(layout.ranks) || !safe) {
    throw ClusterError("rank 0 cannot share the ranks' memory: its files are not what they must be");
  }
  auto space = std::make_shared<SharedSpace>(made, given[0].get());
  given.erase(given.begin());
  return {member(std::move(space), std::move(given)), std::move(heaps)};
}

}  // namespace lockstep::transport
