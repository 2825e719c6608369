// What every call carries beside its request, so that it is known before anything is read: a proof that the caller has
// the job's token, which is not sent, and the caller's version.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>

#include <string>

#include "lockstep/base/version.h"
#include "lockstep/transport/access.h"

namespace lockstep::grpc_service {

// Of a process that calls. Any thread.
class Identity {
 public:
  explicit Identity(const Access& access, std::string version = lockstep::version());
  void add_to(grpc::ClientContext& context) const;

 private:
  std::string nonce_, proof_, version_;
};

// Throws ClusterError for a caller without the token, or of another version.
void check_identity(const grpc::ServerContext& context, const Access& access);

}  // namespace lockstep::grpc_service
