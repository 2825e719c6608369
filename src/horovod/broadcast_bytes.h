// Bytes from one rank to all.
#pragma once

#include <functional>
#include <string>

namespace lockstep::horovod {

// What `make` gives on root, on all ranks. `call` is how the others know it. What `make` throws is an InvalidArgument
// on the others.
std::string broadcast_bytes(const std::string& call, const std::function<std::string()>& make, int root_rank);

}  // namespace lockstep::horovod
