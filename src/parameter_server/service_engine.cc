#include "base/plugin.h"
#include "lockstep/base/error.h"
#include "parameter_server/service.h"

namespace lockstep::parameter_server {

const ServiceEngine& service_engine() {
  static const ServiceEngine* const engine = function_of_plugin<ClusterError, const ServiceEngine*()>(
      {"grpc", "parameter servers", "LOCKSTEP_GRPC"}, "lockstep_grpc_engine")();
  return *engine;
}

}  // namespace lockstep::parameter_server
