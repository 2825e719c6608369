// Metadata that every call carries beside its request, and that the server checks before it reads anything. It has the
// caller's version. With certificates, which several jobs may share, it also has a proof that the caller has the job's
// token. The server has shown its certificate before it gets the proof. Without certificates the connection itself is
// proved (grpc_service/channel.h).
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>

#include <string>

#include "lockstep/base/version.h"
#include "lockstep/transport/access.h"

namespace lockstep::grpc_service {

// The identity of a process that calls. Any thread.
class Identity {
 public:
  explicit Identity(const Access& access, std::string version = lockstep::version());
  void add_to(grpc::ClientContext& context) const;

 private:
  std::string nonce_, proof_, version_;
};

// Throws ClusterError for a caller of another version, and with certificates for one without the token.
void check_identity(const grpc::ServerContext& context, const Access& access);

}  // namespace lockstep::grpc_service
