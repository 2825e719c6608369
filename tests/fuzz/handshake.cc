// Sends what strangers may send to a port of ours: to the handshake at either end, and then to the store.
#include <sys/socket.h>

#include "cluster/store_server.h"
#include "cluster/store_texts.h"
#include "lockstep/base/error.h"
#include "tests/fuzz/fuzz.h"
#include "transport/handshake.h"
#include "transport/socket.h"

namespace lockstep {
namespace {

// A socket from which the bytes can be read, and then no more.
FileDescriptor socket_with(const std::string& bytes, FileDescriptor& other) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) != 0) throw std::runtime_error("no sockets");
  other = FileDescriptor(ends[1]);
  const auto soon = Deadline::after(std::chrono::seconds(1));
  transport::write_all(other, std::as_bytes(std::span(bytes)), soon);
  shutdown(other.get(), SHUT_WR);
  return FileDescriptor(ends[0]);
}

// A store in this process, and a connection that belongs to it.
struct Member {
  Member()
      : server("127.0.0.1:0", {}),
        connection(transport::connect_proved(server.address(), {}, cluster::store_greeting(), soon())),
        seal(connection.keys, transport::End::connects) {}
  static Deadline soon() { return Deadline::after(std::chrono::seconds(5)); }

  cluster::StoreServer server;
  transport::Connection connection;
  transport::Seal seal;
};

// The store answers whatever it is asked, or closes the connection.
void ask_store(const std::string& bytes) {
  static auto member = std::make_unique<Member>();
  std::uint32_t code = 0;
  if (bytes.size() >= sizeof code) std::memcpy(&code, bytes.data(), sizeof code);
  if (code == cluster::StoreFrame::get) return;  // waits
  const auto& socket = member->connection.socket;
  const auto sealed = member->seal.close(bytes);
  transport::write_all(socket, std::as_bytes(std::span(sealed)), Member::soon());
  try {
    std::string rest(transport::read_value<std::uint32_t>(socket, Member::soon()), '\0');
    transport::read_all(socket, std::as_writable_bytes(std::span(rest)), Member::soon());
    if (!cluster::open_frame(member->seal, rest).items) __builtin_trap();
  } catch (const ClusterError&) {
    member = std::make_unique<Member>();
  }
}

}  // namespace

void fuzz(const std::string& bytes) {
  if (bytes.empty() || bytes.size() > 65536) return;
  const auto rest = bytes.substr(1);
  const auto soon = Deadline::after(std::chrono::seconds(1));
  FileDescriptor other;
  switch (bytes[0] % 4) {
    case 0: {
      transport::AcceptingEnd end(socket_with(rest, other));
      while (!end.advance({}, cluster::store_greeting(), [](const transport::Greeting&) { return ""; })) {
      }
      break;
    }
    case 1: transport::introduce(socket_with(rest, other), {}, cluster::store_greeting(), soon); break;
    case 2: cluster::unpack(rest); break;
    default: ask_store(rest);
  }
}

}  // namespace lockstep
