// Mutual TLS between the processes of a job.
#pragma once

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>

#include "lockstep/transport/access.h"

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

}  // namespace lockstep::grpc_service
