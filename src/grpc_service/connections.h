// The calling end.
#pragma once

#include <memory>

#include "parameter_server/service.h"

namespace lockstep::grpc_service {

// As ServiceEngine's.
std::shared_ptr<parameter_server::ServerConnection> connect_server(
    const parameter_server::ServiceEngine::ModelOnServer& of, parameter_server::FindAddress address,
    const Access& access);
bool transfer(const parameter_server::ServiceEngine::ModelOnServer& of, parameter_server::FindAddress address,
              const Access& access, std::int64_t number, parameter_server::ShardStore& to, Deadline deadline);
std::shared_ptr<parameter_server::ChiefConnection> connect_chief(const parameter_server::Process& self,
                                                                 parameter_server::FindAddress address,
                                                                 const Access& access);

}  // namespace lockstep::grpc_service
