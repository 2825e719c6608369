#include "grpc_service/shared_with.h"

namespace lockstep::grpc_service {

std::unique_ptr<SharedWith> SharedWith::make(Caller& server, std::shared_ptr<parameter_server::SharedBlock> block,
                                             Deadline deadline) {
  const auto handle = block->handle();
  Request request;
  auto& head = *request.mutable_share();
  head.set_process(handle.process);
  head.set_file(handle.descriptor);
  head.set_bytes(handle.bytes);
  head.set_nonce(handle.nonce);
  std::unique_ptr<SharedWith> shared(new SharedWith);
  Reply reply;
  shared->stream_ = server.open(request, shared->context_, reply, deadline);
  if (shared->stream_ == nullptr || !reply.has_block()) return nullptr;
  shared->block_ = std::move(block);
  shared->number_ = reply.block();
  return shared;
}

SharedWith::~SharedWith() {
  if (stream_ == nullptr) return;
  context_.TryCancel();
  stream_->Finish();
}

}  // namespace lockstep::grpc_service
