// Connections of a server with TLS on which no call has proved yet that the caller has the job's token.
#pragma once

#include <poll.h>

#include <cstddef>
#include <map>
#include <string>

#include "base/file.h"
#include "base/mutex.h"
#include "lockstep/base/deadline.h"

namespace lockstep::grpc_service {

// gRPC has these connections and makes their TLS handshakes. Their number is bounded, as that of handshakes in
// transport/acceptor.h. So strangers, who need no certificate to connect, do not use up this process's descriptors. One
// thread accepts, and calls `add`, `forget` and `make_room`; any thread may call the others.
class UnprovenConnections {
 public:
  // `most`: so many at a time. Each has two descriptors, gRPC's and a copy that is kept here: gRPC tells nobody when it
  // closes its own.
  explicit UnprovenConnections(std::size_t most) : most_(most) {}

  // Remembers a connection by a copy of its descriptor, before gRPC gets the connection. After a
  // make_room that returned true.
  void add(const FileDescriptor& socket);

  // A call from `peer`, as gRPC names it ("ipv4:127.0.0.1:4000"), has proved that it has the token.
  void prove(const std::string& peer);

  // Forgets the connections that have proved that, or have ended. Ends those that have exceeded their time.
  void forget();

  // Called only when another connection waits to be accepted. Calls `forget`. Where there are still too many, ends the
  // oldest that has sent nothing, else the oldest that is slow. False where there is no room, or no descriptor for the
  // copy.
  bool make_room();

  bool empty() const;

 private:
  struct Connection {
    FileDescriptor copy;
    Deadline::Clock::time_point since;
    bool has_proved = false;
  };
  using Connections = std::multimap<std::string, Connection>;  // [peer], which may be connected to several addresses
  static void forget(Connections& connections, Deadline::Clock::time_point now);

  const std::size_t most_;
  FileDescriptor reserved_;  // becomes the next copy
  mutable Mutex mutex_;
  Connections connections_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::grpc_service
