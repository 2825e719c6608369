// Lockstep's exceptions as statuses of gRPC, and back.
#pragma once

#include <grpcpp/support/status.h>

#include <exception>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep::grpc_service {

// A shared block that the server does not have (any more).
class UnknownBlock : public Error {
 public:
  using Error::Error;
};

// Returns the status of the exception that is handled.
grpc::Status status_of_exception();

// True where the call may succeed later: the process is starting again, or cannot be reached.
bool may_come_back(const grpc::Status& status);

// Throws what status_of_exception was made of; `who` has answered.
[[noreturn]] void throw_status(const grpc::Status& status, const std::string& who);

}  // namespace lockstep::grpc_service
