// A block of this process's memory that a server accesses.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>

#include "grpc_service/caller.h"
#include "parameter_server/shared_block.h"

namespace lockstep::grpc_service {

// Any thread may read it; the rest is for one. The server forgets the block when this ends.
class SharedWith {
 public:
  // Null where the server cannot reach the block.
  static std::unique_ptr<SharedWith> make(Caller& server, std::shared_ptr<parameter_server::SharedBlock> block,
                                          Deadline deadline);
  ~SharedWith();
  SharedWith(const SharedWith&) = delete;
  SharedWith& operator=(const SharedWith&) = delete;

  const std::shared_ptr<parameter_server::SharedBlock>& block() const { return block_; }
  std::int64_t number() const { return number_; }  // on the server

 private:
  SharedWith() = default;

  std::shared_ptr<parameter_server::SharedBlock> block_;
  std::int64_t number_ = 0;
  grpc::ClientContext context_;
  std::unique_ptr<ClientStream> stream_;
};

}  // namespace lockstep::grpc_service
