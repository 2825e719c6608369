// A connection that both ends have proved (transport/handshake.h), as a channel of gRPC.
#pragma once

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "lockstep/base/deadline.h"
#include "transport/handshake.h"

namespace lockstep::grpc_service {

// Both ends send this greeting first.
transport::Greeting calls_greeting();

// Connects once. Null where nobody at the address proves that it belongs to the job; `problem` then says why. With
// certificates TLS takes the place of the handshake, and gRPC connects when the channel is first used. A channel does
// not connect again: after a call that failed, make another one, to where the process answers then.
std::shared_ptr<grpc::Channel> open_channel(const std::string& address, const Access& access, Deadline deadline,
                                            std::string& problem);

}  // namespace lockstep::grpc_service
