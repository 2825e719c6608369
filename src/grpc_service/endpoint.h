// The answering end.
#pragma once

#include <memory>
#include <string>

#include "lockstep/transport/access.h"
#include "parameter_server/service.h"

namespace lockstep::grpc_service {

// As ServiceEngine::serve.
std::unique_ptr<parameter_server::Endpoint> serve(const std::string& address, const Access& access,
                                                  const parameter_server::Services& services);

}  // namespace lockstep::grpc_service
