// Pushes that a server keeps until the other parts of their step have come.
#pragma once

#include <cstddef>
#include <vector>

#include "parameter_server/push.h"
#include "parameter_server/state_stream.h"

namespace lockstep::parameter_server {

// Bytes of what pushes have.
struct PushSizes {
  std::vector<std::size_t> shards;  // of each
  std::vector<std::size_t> rows;    // of one row of each table
};

// Has it own copies of what it points at.
void keep(Push& push, const PushSizes& sizes);

void send(const Push& push, const PushSizes& sizes, StateWriter& to);
Push receive_push(const PushSizes& sizes, StateReader& from);

}  // namespace lockstep::parameter_server
