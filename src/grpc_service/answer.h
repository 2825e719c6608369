// The answers of a process to another one's calls.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include "grpc_service/blocks.h"
#include "grpc_service/messages.pb.h"
#include "grpc_service/receive_buffers.h"
#include "parameter_server/service.h"

namespace lockstep::grpc_service {

// The two directions of a call. False: the other end has closed its own.
class CallStream {
 public:
  virtual ~CallStream() = default;
  virtual bool read(grpc::ByteBuffer& frame) = 0;
  virtual bool write(const grpc::ByteBuffer& frame) = 0;
  virtual bool cancelled() const = 0;  // the other end waits for no answer any more
};

// State that all calls which a process answers share. Any thread.
struct AnswerState {
  Blocks blocks;
  ReceiveBuffers buffers;
};

// Answers a call whose first message was `request`. Throws what the services throw, and InvalidArgument for a request
// that fits nothing.
void answer(const parameter_server::Services& services, AnswerState& state, CallStream& stream, const Request& request);

}  // namespace lockstep::grpc_service
