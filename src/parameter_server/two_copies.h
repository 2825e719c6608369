// Shards that two servers have.
#pragma once

#include <memory>

#include "parameter_server/service.h"

namespace lockstep::parameter_server {

// Reads the first copy and changes both. Each server makes the same updates, so that what one has acknowledged is not
// lost with it. A server that is started again gets the state from the other one. A push or restore is repeated that
// may have reached one server before such a transfer and the other one after the transfer.
std::shared_ptr<ServerConnection> connect_two_copies(std::shared_ptr<ServerConnection> first,
                                                     std::shared_ptr<ServerConnection> second);

}  // namespace lockstep::parameter_server
