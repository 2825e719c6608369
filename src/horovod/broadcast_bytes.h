// Bytes from one rank to all.
#pragma once

#include <functional>
#include <string>

namespace lockstep::horovod {

// Returns, on all ranks, what `make` returns on root. `call` describes the operation to the others. An exception of
// `make` is an InvalidArgument on the others.
std::string broadcast_bytes(const std::string& call, const std::function<std::string()>& make, int root_rank);

}  // namespace lockstep::horovod
