// Libraries of ours that are loaded when they are first needed.
#pragma once

#include <string>

namespace lockstep {

// liblockstep_grpc.so, which lies beside this library: what needs no gRPC does not load it. Returns the function of
// that name. Throws ClusterError saying what `needs` it.
void* function_of_grpc_plugin(const char* function, const std::string& needs);

}  // namespace lockstep
