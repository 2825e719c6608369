#include "transport/socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/text.h"

namespace lockstep::transport {
namespace {

constexpr std::chrono::milliseconds kBetweenTries(20);
constexpr int kLastPort = 65535;

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

ClusterError bad_address(const std::string& address, const std::string& why) {
  return ClusterError(text("the address \"", address, "\" ", why, "; it must be host:port"));
}

// The resolver's error, or 0 and the list.
int look_up(const std::string& address, AddressList& found) {
  const auto colon = address.rfind(':');
  if (colon == std::string::npos) throw bad_address(address, "has no port");
  const auto port = whole_number(std::string_view(address).substr(colon + 1));
  if (!port || *port < 0 || *port > kLastPort) throw bad_address(address, text("has no port from 1 to ", kLastPort));
  auto host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), address.substr(colon + 1).c_str(), &hints, &list);
  if (error == 0) found = AddressList(list, &freeaddrinfo);
  return error;
}

AddressList parse(const std::string& address) {
  AddressList found(nullptr, &freeaddrinfo);
  const int error = look_up(address, found);
  if (error != 0) throw bad_address(address, text("cannot be used (", gai_strerror(error), ")"));
  return found;
}

// A name may get its address when its host starts.
bool may_come(int error) { return error == EAI_AGAIN || error == EAI_NONAME || error == EAI_NODATA; }

FileDescriptor open_socket(const addrinfo& address) {
  FileDescriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.open()) throw ClusterError(text("cannot open a socket: ", std::strerror(errno)));
  return socket;
}

std::string numeric_host(const sockaddr* address, socklen_t size) {
  char host[NI_MAXHOST] = "";
  getnameinfo(address, size, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  return host;
}

// The address of one end of the socket: by getsockname of its own, by getpeername of the other.
sockaddr_storage end_of(const FileDescriptor& socket, decltype(&getsockname) get) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  get(socket.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return address;
}

std::string own_host_of(const FileDescriptor& socket) {
  const auto address = end_of(socket, getsockname);
  return numeric_host(reinterpret_cast<const sockaddr*>(&address), sizeof address);
}

void set_option(const FileDescriptor& socket, int level, int option, int value) {
  setsockopt(socket.get(), level, option, &value, sizeof value);
}

void require_access(const std::string& address, const addrinfo& where, const Access& access) {
  const bool of_job = !access.token.empty() && !access.of_this_user;
  if (of_job || is_loopback(numeric_host(where.ai_addr, where.ai_addrlen))) return;
  if (!access.trusted_network) {
    throw ClusterError(
        text("listening at ", address,
             " needs a token, so that only processes of this job get in: write one to a file that all of "
             "them can read (openssl rand -hex 32, chmod 600) and name it in LOCKSTEP_TOKEN_FILE; where "
             "everybody who reaches this network is trusted, set LOCKSTEP_TRUSTED_NETWORK=1"));
  }
  static std::atomic<bool> told{false};
  if (!told.exchange(true)) {
    log_warning(
        text("listening at ", address,
             " without a token (LOCKSTEP_TRUSTED_NETWORK): whoever reaches it can read and change what is trained"));
  }
}

// Connects once; returns the error.
int try_connect(const FileDescriptor& socket, const addrinfo& address, Deadline deadline) {
  if (connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  return wait_for_events(socket.get(), POLLOUT, deadline) ? error_of(socket) : ETIMEDOUT;
}

// Connects once; a closed descriptor where that fails. `problem` then says why, and `unknown` is the resolver's error,
// or 0.
FileDescriptor try_to_connect(const std::string& address, Deadline deadline, std::string& problem, int& unknown) {
  AddressList where(nullptr, &freeaddrinfo);
  unknown = look_up(address, where);
  if (unknown != 0) {
    problem = gai_strerror(unknown);
    return {};
  }
  auto socket = open_socket(*where);
  if (const int error = try_connect(socket, *where, deadline); error != 0) {
    problem = std::strerror(error);
    return {};
  }
  send_at_once(socket);
  return socket;
}

// Called where a call on the socket moved nothing: waits until one can.
void wait_for_bytes(const FileDescriptor& socket, short events, Deadline deadline, const char* operation) {
  if (errno != EAGAIN && errno != EINTR) throw_broken(errno);
  if (!wait_for_events(socket.get(), events, deadline)) throw DeadlineExceeded(operation, deadline.waited());
}

// A v4 address as the v6 address that stands for it.
SocketAddress socket_address(const sockaddr_storage& address) {
  SocketAddress found;
  if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    std::memcpy(found.host.data(), &v6.sin6_addr, found.host.size());
    found.port = v6.sin6_port;
  } else if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    found.host[10] = found.host[11] = 0xff;
    std::memcpy(found.host.data() + 12, &v4.sin_addr, sizeof v4.sin_addr);
    found.port = v4.sin_port;
  }
  return found;
}

in6_addr v6_of(const SocketAddress& address) { return std::bit_cast<in6_addr>(address.host); }

bool is_v4(const SocketAddress& address) {
  const auto host = v6_of(address);
  return IN6_IS_ADDR_V4MAPPED(&host);
}

}  // namespace

void throw_broken(int error) {
  const auto problem = text("a connection broke: ", std::strerror(error));
  if (error == EPIPE || error == ECONNRESET) throw ConnectionClosed(problem);
  throw ClusterError(problem);
}

SocketAddress own_end_of(const FileDescriptor& socket) { return socket_address(end_of(socket, getsockname)); }
SocketAddress other_end_of(const FileDescriptor& socket) { return socket_address(end_of(socket, getpeername)); }

bool is_loopback(const SocketAddress& address) {
  if (is_v4(address)) return address.host[12] == IN_LOOPBACKNET;
  const auto host = v6_of(address);
  return IN6_IS_ADDR_LOOPBACK(&host);
}

std::string this_network() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat network {};
  if (stat("/proc/thread-self/ns/net", &network) != 0) network = {};
  return text(boot, " ", network.st_dev, " ", network.st_ino);
}

std::string print(const SocketAddress& address) {
  char host[INET6_ADDRSTRLEN] = "";
  const bool v4 = is_v4(address);
  inet_ntop(v4 ? AF_INET : AF_INET6, address.host.data() + (v4 ? 12 : 0), host, sizeof host);
  return with_port(host, ntohs(address.port));
}

FileDescriptor listen_at(const std::string& address, const Access& access) {
  const auto where = parse(address);
  require_access(address, *where, access);
  auto socket = open_socket(*where);
  set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  if (where->ai_family == AF_INET6) set_option(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (bind(socket.get(), where->ai_addr, where->ai_addrlen) != 0 || listen(socket.get(), SOMAXCONN) != 0) {
    throw ClusterError(text("cannot listen at ", address, ": ", std::strerror(errno)));
  }
  return socket;
}

bool has_ipv6() { return FileDescriptor(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0)).open(); }

bool is_loopback(const std::string& host) {
  in_addr v4{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == IN_LOOPBACKNET;
  return host == "::1" || host == "localhost";
}

std::string with_port(const std::string& host, int port) {
  const bool v6 = host.find(':') != std::string::npos && host.front() != '[';
  return text(v6 ? "[" : "", host, v6 ? "]" : "", ":", port);
}

FileDescriptor listen_at_any_port(const std::string& address, const Access& access) {
  return listen_at(with_port(address, 0), access);
}

std::string local_address(const FileDescriptor& socket) {
  return with_port(own_host_of(socket), ntohs(own_end_of(socket).port));
}

std::string address_towards(const std::string& host, Deadline deadline) {
  constexpr int kAnyPort = 9;
  AddressList where(nullptr, &freeaddrinfo);
  while (const int unknown = look_up(with_port(host, kAnyPort), where)) {
    if (!may_come(unknown) || deadline.passed()) {
      throw ClusterError(text("the host \"", host, "\" cannot be found: ", gai_strerror(unknown)));
    }
    std::this_thread::sleep_for(kBetweenTries);
  }
  const FileDescriptor socket(::socket(where->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  // Sends nothing: connect on a UDP socket only selects the route.
  if (!socket.open() || connect(socket.get(), where->ai_addr, where->ai_addrlen) != 0) {
    throw ClusterError(text("there is no way to ", host, ": ", std::strerror(errno)));
  }
  return own_host_of(socket);
}

FileDescriptor connect_to(const std::string& address, Deadline deadline) {
  if (address.ends_with(":0")) throw bad_address(address, "has the port 0, at which nobody listens");
  for (bool told = false;;) {
    std::string problem;
    int unknown = 0;
    auto socket = try_to_connect(address, deadline, problem, unknown);
    if (socket.open()) return socket;
    if (unknown != 0 && !may_come(unknown)) throw bad_address(address, text("cannot be used (", problem, ")"));
    if (unknown != 0 && !std::exchange(told, true))
      log_warning(text("connecting to ", address, ": ", problem, "; trying again"));
    if (deadline.passed()) {
      throw DeadlineExceeded(text("connecting to ", address), deadline.waited(), {}, text(" (", problem, ")"));
    }
    std::this_thread::sleep_for(kBetweenTries);
  }
}

FileDescriptor begin_to_connect(const std::string& address) {
  AddressList where(nullptr, &freeaddrinfo);
  if (look_up(address, where) != 0) return {};
  auto socket = open_socket(*where);
  send_at_once(socket);
  if (connect(socket.get(), where->ai_addr, where->ai_addrlen) != 0 && errno != EINPROGRESS) return {};
  return socket;
}

int error_of(const FileDescriptor& socket) {
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

FileDescriptor connect_once(const std::string& address, Deadline deadline, std::string& problem) {
  int unknown = 0;
  return try_to_connect(address, deadline, problem, unknown);
}

bool answers_at(const std::string& address, Deadline deadline) {
  std::string problem;
  return connect_once(address, deadline, problem).open();
}

void send_at_once(const FileDescriptor& socket) { set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1); }

FileDescriptor accept_from(const FileDescriptor& listener, Deadline deadline) {
  while (true) {
    FileDescriptor socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.open()) {
      send_at_once(socket);
      return socket;
    }
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
      throw ClusterError(text("cannot accept a connection: ", std::strerror(errno)));
    }
    if (!wait_for_events(listener.get(), POLLIN, deadline))
      throw DeadlineExceeded("accepting a connection", deadline.waited());
  }
}

void write_all(const FileDescriptor& socket, std::span<const std::byte> bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const auto written = send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (written <= 0) wait_for_bytes(socket, POLLOUT, deadline, "writing to a connection");
    bytes = bytes.subspan(static_cast<std::size_t>(std::max<ssize_t>(0, written)));
  }
}

void read_all(const FileDescriptor& socket, std::span<std::byte> bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const auto count = recv(socket.get(), bytes.data(), bytes.size(), 0);
    if (count == 0) throw ConnectionClosed();
    if (count < 0) wait_for_bytes(socket, POLLIN, deadline, "reading from a connection");
    bytes = bytes.subspan(static_cast<std::size_t>(std::max<ssize_t>(0, count)));
  }
}

void keep_alive(const FileDescriptor& socket, double seconds) {
  const int idle = std::max(1, static_cast<int>(seconds / 3)), between = std::max(1, idle / 2);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, idle);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, between);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, std::max(1, (static_cast<int>(seconds) - idle) / between));
  // While bytes that were sent have not arrived, nothing is probed, and they are sent again for a quarter of an hour.
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(1000 * seconds));
}

int milliseconds_to(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.time() - Deadline::Clock::now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 1'000'000));
}

bool wait_for_events(int fd, short events, Deadline deadline) {
  while (true) {
    pollfd poll{fd, events, 0};
    const int ready = ::poll(&poll, 1, milliseconds_to(deadline));
    if (ready > 0) return true;
    if (ready == 0 && deadline.passed()) return false;
  }
}

}  // namespace lockstep::transport
