// Sockets with deadlines: non-blocking descriptors, whole messages.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/file.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/transport/access.h"

namespace lockstep::transport {

// The other side has ended a connection.
class ConnectionClosed : public ClusterError {
 public:
  ConnectionClosed() : ClusterError("a connection was closed by the other side") {}
  using ClusterError::ClusterError;
};

// Throws ConnectionClosed where errno, `error`, says that the other side has ended the connection; else ClusterError.
[[noreturn]] void throw_broken(int error);

// One end of a TCP connection, in the byte order of networks: an IPv6 address (IPv4: ::ffff:a.b.c.d) and a port. Zero
// for sockets of other kinds.
struct SocketAddress {
  std::array<unsigned char, 16> host{};
  std::uint16_t port = 0;
  bool operator==(const SocketAddress&) const = default;
};
SocketAddress own_end_of(const FileDescriptor& socket);
SocketAddress other_end_of(const FileDescriptor& socket);
bool is_loopback(const SocketAddress& address);

// The host and its network namespace in which this thread's loopback addresses are. Parts that the system does not tell
// are empty.
std::string this_network();

std::string print(const SocketAddress& address);  // as "host:port"

bool has_ipv6();  // of the system, whether or not an interface has such an address
// True for a numeric loopback address, and for "localhost".
bool is_loopback(const std::string& host);

// "host:port", or "[v6]:port".
std::string with_port(const std::string& host, int port);

// Listens on "host:port" (or "[v6]:port"); port 0 takes a free one. Throws ClusterError naming the address, and where
// it is not a loopback address and `access` has neither a token nor trust.
FileDescriptor listen_at(const std::string& address, const Access& access);

// Listens at a numeric address, v4 or v6, on a port of the system's choosing; else as listen_at.
FileDescriptor listen_at_any_port(const std::string& address, const Access& access);

// "host:port" at which a listening socket can be reached.
std::string local_address(const FileDescriptor& socket);

// Connects, trying again until the deadline while nobody listens there or the name is not known. Throws ClusterError,
// DeadlineExceeded.
FileDescriptor connect_to(const std::string& address, Deadline deadline);

// Begins a connection and does not wait: poll(2) for POLLOUT tells when it is made, or has failed, which error_of says.
// A closed descriptor where the address is not known.
FileDescriptor begin_to_connect(const std::string& address);
int error_of(const FileDescriptor& socket);  // of errno; 0: none

// Connects once; a closed descriptor where that fails, by the deadline, and `problem` says why.
FileDescriptor connect_once(const std::string& address, Deadline deadline, std::string& problem);

// True where a connection can be made; false as soon as it is refused, and at the deadline.
bool answers_at(const std::string& address, Deadline deadline);

// Sends what is written at once and does not wait for more (TCP_NODELAY).
void send_at_once(const FileDescriptor& socket);

// The next connection; throws DeadlineExceeded. Works for TCP and Unix sockets.
FileDescriptor accept_from(const FileDescriptor& listener, Deadline deadline);

// All bytes or an exception: DeadlineExceeded, or ClusterError when the other side has closed.
void write_all(const FileDescriptor& socket, std::span<const std::byte> bytes, Deadline deadline);
void read_all(const FileDescriptor& socket, std::span<std::byte> bytes, Deadline deadline);

template <class T>
void write_value(const FileDescriptor& socket, const T& value, Deadline deadline) {
  write_all(socket, std::as_bytes(std::span(&value, 1)), deadline);
}

template <class T>
T read_value(const FileDescriptor& socket, Deadline deadline) {
  T value;
  read_all(socket, std::as_writable_bytes(std::span(&value, 1)), deadline);
  return value;
}

// The numeric address of this machine from which it reaches `host`, a name or an address. A name that is not known yet
// is asked for again until the deadline. Throws ClusterError naming it.
std::string address_towards(const std::string& host, Deadline deadline);

// Lets a silent connection break within about so many seconds when the other side's host does not answer any more.
void keep_alive(const FileDescriptor& socket, double seconds);

// Waits for `events` of poll(2); false at the deadline.
bool wait_for_events(int fd, short events, Deadline deadline);

// The time to wait in poll(2): a quarter of an hour at most.
int milliseconds_to(Deadline deadline);

}  // namespace lockstep::transport
