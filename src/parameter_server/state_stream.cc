#include "parameter_server/state_stream.h"

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {

void StateReader::expect(std::int64_t expected) {
  const auto found = number<std::int64_t>();
  if (found == expected) return;
  throw DataError(text("another server's state of a shard has ", found, " where ", expected, " is expected"));
}

}  // namespace lockstep::parameter_server
