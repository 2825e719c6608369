#include "parameter_server/grpc_service/unproven_connections.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <chrono>

#include "base/log.h"
#include "base/text.h"

namespace lockstep::grpc_service {
namespace {

// gRPC ends connections that do not complete the TLS handshake sooner (endpoint.cc).
constexpr std::chrono::seconds kToProve(30), kToBelong(2);
constexpr std::chrono::milliseconds kToSpeak(100);

// gRPC's name of the other end, but with the brackets of IPv6, which gRPC writes as %5B and %5D.
std::string peer_of(const FileDescriptor& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (getpeername(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) return {};
  char host[INET6_ADDRSTRLEN] = {};
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    return text("ipv4:", inet_ntop(AF_INET, &v4.sin_addr, host, sizeof host), ":", ntohs(v4.sin_port));
  }
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
    return text("ipv4:", inet_ntop(AF_INET, &v6.sin6_addr.s6_addr[12], host, sizeof host), ":", ntohs(v6.sin6_port));
  }
  return text("ipv6:[", inet_ntop(AF_INET6, &v6.sin6_addr, host, sizeof host), "]:", ntohs(v6.sin6_port));
}

// The name with brackets, and without the zone of a link-local address ("%25eth0").
std::string with_brackets(std::string peer) {
  const auto replace = [&](const std::string& escaped, const char* bracket) {
    const auto at = peer.find(escaped);
    if (at != std::string::npos) peer.replace(at, escaped.size(), bracket);
  };
  replace("%5B", "[");
  replace("%5D", "]");
  const auto zone = peer.find('%');
  if (zone != std::string::npos) peer.erase(zone, peer.find(']', zone) - zone);
  return peer;
}

bool has_ended(const FileDescriptor& socket) {
  pollfd polled{socket.get(), 0, 0};
  return poll(&polled, 1, 0) > 0;
}

bool has_sent(const FileDescriptor& socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  return getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &size) == 0 && info.tcpi_bytes_received > 0;
}

void end(const FileDescriptor& socket) { shutdown(socket.get(), SHUT_RDWR); }

}  // namespace

void UnprovenConnections::add(const FileDescriptor& socket) {
  dup3(socket.get(), reserved_.get(), O_CLOEXEC);
  MutexLock lock(mutex_);
  connections_.emplace(peer_of(socket), Connection{std::move(reserved_), Deadline::Clock::now()});
}

void UnprovenConnections::prove(const std::string& peer) {
  MutexLock lock(mutex_);
  const auto [first, last] = connections_.equal_range(with_brackets(peer));
  for (auto i = first; i != last; ++i) i->second.has_proved = true;
}

void UnprovenConnections::forget() {
  MutexLock lock(mutex_);
  forget(connections_, Deadline::Clock::now());
}

void UnprovenConnections::forget(Connections& connections, Deadline::Clock::time_point now) {
  std::erase_if(connections, [&](const auto& entry) {
    const auto& connection = entry.second;
    if (connection.has_proved || has_ended(connection.copy)) return true;
    if (now - connection.since <= kToProve) return false;
    end(connection.copy);
    return true;
  });
}

bool UnprovenConnections::make_room() {
  if (!reserved_.open()) reserved_ = FileDescriptor(eventfd(0, EFD_CLOEXEC));
  if (!reserved_.open()) return false;
  const auto now = Deadline::Clock::now();
  MutexLock lock(mutex_);
  forget(connections_, now);
  if (connections_.size() < most_) return true;
  auto last = connections_.end();
  for (const bool silent : {true, false}) {
    if (last != connections_.end()) break;
    for (auto i = connections_.begin(); i != connections_.end(); ++i) {
      const auto& [copy, since, has_proved] = i->second;
      if (now - since <= (silent ? std::chrono::nanoseconds(kToSpeak) : kToBelong) || (silent && has_sent(copy)))
        continue;
      if (last == connections_.end() || since < last->second.since) last = i;
    }
  }
  if (last == connections_.end()) return false;
  end(last->second.copy);
  connections_.erase(last);
  static RepeatedWarning warning;
  warning.log(text("turned a connection away: more than ", most_,
                   " at a time have not proved by a call that they belong to this job"));
  return true;
}

bool UnprovenConnections::empty() const {
  MutexLock lock(mutex_);
  return connections_.empty();
}

}  // namespace lockstep::grpc_service
