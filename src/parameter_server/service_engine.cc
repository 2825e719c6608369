#include "base/plugin.h"
#include "parameter_server/service.h"

namespace lockstep::parameter_server {

const ServiceEngine& service_engine() {
  using Function = const ServiceEngine* (*)();
  static const ServiceEngine* const engine =
      reinterpret_cast<Function>(function_of_grpc_plugin("lockstep_grpc_engine", "parameter servers"))();
  return *engine;
}

}  // namespace lockstep::parameter_server
