// Bytes from one rank to all.
#pragma once

#include <string>

namespace lockstep::horovod {

// Root's bytes on all ranks. `call` is how the others know it.
std::string share_bytes(const std::string& call, const std::string& bytes, int root_rank);

}  // namespace lockstep::horovod
