// Bulk data of several parts, in memory.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "grpc_service/receive_buffers.h"

namespace lockstep::grpc_service {

// Memory for parts of these sizes, each aligned for any element.
struct Parts {
  Parts(const std::vector<std::size_t>& sizes, ReceiveBuffers& buffers);

  std::shared_ptr<std::byte[]> memory;
  std::vector<std::span<std::byte>> parts;
};

// Reads parts, as read_bulk. Parts that are `rounded` are floats that come as bfloat16; an empty `rounded` names none.
Parts read_parts(const std::vector<std::size_t>& sizes, const std::vector<bool>& rounded, ReceiveBuffers& buffers,
                 const std::function<bool(grpc::ByteBuffer&)>& read);

}  // namespace lockstep::grpc_service
