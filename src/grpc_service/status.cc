#include "grpc_service/status.h"

#include "base/text.h"

namespace lockstep::grpc_service {

grpc::Status status_of_exception() {
  try {
    throw;
  } catch (const UnknownBlock& error) {
    return {grpc::StatusCode::FAILED_PRECONDITION, error.what()};
  } catch (const InvalidArgument& error) {
    return {grpc::StatusCode::INVALID_ARGUMENT, error.what()};
  } catch (const DeadlineExceeded& error) {
    return {grpc::StatusCode::DEADLINE_EXCEEDED, error.what()};
  } catch (const Aborted& error) {
    return {grpc::StatusCode::UNAVAILABLE, error.what()};
  } catch (const ClusterError& error) {
    return {grpc::StatusCode::UNAUTHENTICATED, error.what()};
  } catch (const std::exception& error) {
    return {grpc::StatusCode::INTERNAL, error.what()};
  }
}

bool may_come_back(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::UNAVAILABLE || status.error_code() == grpc::StatusCode::CANCELLED;
}

void throw_status(const grpc::Status& status, const std::string& who) {
  const auto what = text(who, ": ", status.error_message());
  switch (status.error_code()) {
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::RESOURCE_EXHAUSTED: throw InvalidArgument(what);
    case grpc::StatusCode::FAILED_PRECONDITION: throw UnknownBlock(what);
    case grpc::StatusCode::UNAUTHENTICATED: throw ClusterError(what);
    default: throw Error(what);
  }
}

}  // namespace lockstep::grpc_service
