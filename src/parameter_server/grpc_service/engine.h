// Both ends of calls between processes: how a process connects, and how it answers.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <functional>
#include <memory>
#include <string>

#include "lockstep/transport/access.h"
#include "parameter_server/grpc_service/frames.h"
#include "parameter_server/grpc_service/messages.pb.h"
#include "parameter_server/grpc_service/shared_blocks.h"
#include "parameter_server/service.h"

namespace lockstep::grpc_service {

// The library for gRPC gives one to the process that loads it.
class GrpcEngine final : public parameter_server::ServiceEngine {
 public:
  std::unique_ptr<parameter_server::Endpoint> serve(const std::string& address, const Access& access,
                                                    const parameter_server::Services& services) const override;
  std::shared_ptr<parameter_server::ServerConnection> connect_server(const ModelOnServer& of,
                                                                     parameter_server::FindAddress address,
                                                                     const Access& access) const override;
  bool transfer(const ModelOnServer& of, parameter_server::FindAddress address, const Access& access,
                std::int64_t number, parameter_server::ShardStore& to, Deadline deadline) const override;
  std::shared_ptr<parameter_server::ChiefConnection> connect_chief(const parameter_server::Process& self,
                                                                   parameter_server::FindAddress address,
                                                                   const Access& access) const override;
};

// The two directions of a call. False: the other end has closed its own.
struct CallStream {
  std::function<bool(grpc::ByteBuffer& frame)> read;
  std::function<bool(const grpc::ByteBuffer& frame)> write;
  std::function<bool()> cancelled;  // the other end waits for no answer any more
};

// State that all calls which a process answers share. Any thread.
struct AnswerState {
  Blocks blocks;
  ReceiveBuffers buffers;
};

// Answers a call whose first message was `request`. Throws what the services throw, and InvalidArgument for a request
// that fits nothing.
void answer(const parameter_server::Services& services, AnswerState& state, const CallStream& stream,
            const Request& request);

}  // namespace lockstep::grpc_service
