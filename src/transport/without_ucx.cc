// Stands in for ucx/ where a build has no UCX.
#include "lockstep/base/error.h"
#include "transport/network_channels.h"

namespace lockstep::transport {

bool ucx_is_built() { return false; }

std::string why_no_ucx() {
  return "the backend \"ucx\" is not in this build: there was no UCX when it was configured (tools/bootstrap brings "
         "one)";
}

std::unique_ptr<Channels> make_ucx_channels(const ChannelOptions&, const AllGather&, Deadline) {
  throw InvalidArgument(why_no_ucx());
}

}  // namespace lockstep::transport
