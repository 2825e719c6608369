// The library for gRPC gives these functions to the process that loads it.
#include "grpc_service/connections.h"
#include "grpc_service/endpoint.h"

namespace lockstep::grpc_service {
namespace {

using namespace parameter_server;

class GrpcEngine final : public ServiceEngine {
  std::unique_ptr<Endpoint> serve(const std::string& address, const Access& access,
                                  const Services& services) const override {
    return grpc_service::serve(address, access, services);
  }
  std::shared_ptr<ServerConnection> connect_server(const ModelOnServer& of, FindAddress address,
                                                   const Access& access) const override {
    return grpc_service::connect_server(of, std::move(address), access);
  }
  bool transfer(const ModelOnServer& of, FindAddress address, const Access& access, std::int64_t number, ShardStore& to,
                Deadline deadline) const override {
    return grpc_service::transfer(of, std::move(address), access, number, to, deadline);
  }
  std::shared_ptr<ChiefConnection> connect_chief(const Process& self, FindAddress address,
                                                 const Access& access) const override {
    return grpc_service::connect_chief(self, std::move(address), access);
  }
};

}  // namespace
}  // namespace lockstep::grpc_service

extern "C" const lockstep::parameter_server::ServiceEngine* lockstep_grpc_engine() {
  static const lockstep::grpc_service::GrpcEngine engine;
  return &engine;
}
