#include "cluster/store_bootstrap.h"

#include "base/text.h"
#include "lockstep/error.h"

namespace lockstep {

std::vector<std::string> StoreBootstrap::all_gather(const std::string& mine, Deadline deadline) {
  const auto prefix = text("generation ", world_.generation, "/", name_, "/round ", round_++, "/rank ");
  std::vector<std::string> keys;
  for (int r = 0; r < size(); ++r) keys.push_back(text(prefix, r));
  store_.set(keys[static_cast<std::size_t>(rank())], mine, deadline);
  try {
    return store_.get(keys, deadline);
  } catch (const DeadlineExceeded& error) {
    throw DeadlineExceeded("making a group", error.waited_for(), error.ranks());
  }
}

}  // namespace lockstep
