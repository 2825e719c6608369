// ParameterServerStrategy's constructor. A program that may choose this strategy, and asks it nothing, builds and links
// none of its library.
#include "lockstep/strategy/parameter_server_strategy.h"

#include <memory>
#include <utility>

#include "base/process.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

std::shared_ptr<StrategyImpl> make(ParameterServerOptions&& options) {
  using Make = void(ParameterServerOptions&&, std::shared_ptr<StrategyImpl>&);
  static Make* const make_in_library = function_of_plugin<ClusterError, Make>(
      {"servers", "parameter servers", "LOCKSTEP_GRPC"}, "lockstep_make_parameter_servers");
  std::shared_ptr<StrategyImpl> made;
  make_in_library(std::move(options), made);
  return made;
}

}  // namespace

ParameterServerStrategy::ParameterServerStrategy(ParameterServerOptions options) : Strategy(make(std::move(options))) {}

}  // namespace lockstep
