// Who may call: mutual TLS between the processes of a job, the identity that every call carries, and connections that
// both ends have proved (transport/handshake.h) as channels of gRPC.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_context.h>

#include <memory>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/version.h"
#include "lockstep/transport/access.h"
#include "transport/handshake.h"

namespace lockstep::grpc_service {

// The name in a job's certificate, on whatever host it is.
inline constexpr const char* kTlsName = "lockstep";

// Read `access.certificates`: both ends show the job's certificate. Without certificates: no TLS. Throw ClusterError,
// naming the file, for one that cannot be read, and for a private key that others may read.
std::shared_ptr<grpc::ServerCredentials> server_credentials(const Access& access);
std::shared_ptr<grpc::ChannelCredentials> channel_credentials(const Access& access);

// The address of a server as others are told it: "tls://host:port" where it uses TLS.
std::string told_address(const std::string& address, const Access& access);

// The address to call. Throws ClusterError, naming `server`, where one of the two uses TLS and the other does not.
std::string called_address(const std::string& told, const Access& access, const std::string& server);

// True where a call failed because the other end showed no certificate of this job.
bool is_refused_certificate(const std::string& message);

// Metadata that every call carries beside its request, and that the server checks before it reads anything. It has the
// caller's version. With certificates, which several jobs may share, it also has a proof that the caller has the job's
// token. The server has shown its certificate before it gets the proof. Without certificates the connection itself is
// proved.

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

// Both ends send this greeting first.
transport::Greeting calls_greeting();

// Connects once. Null where nobody at the address proves that it belongs to the job; `problem` then says why. With
// certificates TLS takes the place of the handshake, and gRPC connects when the channel is first used. A channel does
// not connect again: after a call that failed, make another one, to where the process answers then.
std::shared_ptr<grpc::Channel> open_channel(const std::string& address, const Access& access, Deadline deadline,
                                            std::string& problem);

}  // namespace lockstep::grpc_service
