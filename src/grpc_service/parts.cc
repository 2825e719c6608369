#include "grpc_service/parts.h"

#include <algorithm>

#include "grpc_service/bfloat16.h"
#include "grpc_service/frames.h"

namespace lockstep::grpc_service {

Parts::Parts(const std::vector<std::size_t>& sizes, ReceiveBuffers& buffers) {
  const auto room_for = [](std::size_t size) { return (size + 63) / 64 * 64; };
  std::size_t total = 0;
  for (const auto size : sizes) total += room_for(size);
  memory = buffers.take(total);
  auto* at = memory.get();
  for (const auto size : sizes) {
    parts.emplace_back(at, size);
    at += room_for(size);
  }
}

Parts read_parts(const std::vector<std::size_t>& sizes, const std::vector<bool>& rounded, ReceiveBuffers& buffers,
                 const std::function<bool(grpc::ByteBuffer&)>& read) {
  Parts result(sizes, buffers);
  if (std::find(rounded.begin(), rounded.end(), true) == rounded.end()) {
    read_bulk(result.parts, read);
    return result;
  }
  auto sent = sizes;
  for (std::size_t i = 0; i < sizes.size(); ++i) sent[i] /= rounded[i] ? 2 : 1;
  const Parts received(sent, buffers);
  read_bulk(received.parts, read);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (rounded[i]) {
      from_bfloat16(received.parts[i], result.parts[i]);
    } else {
      std::copy_n(received.parts[i].begin(), sizes[i], result.parts[i].begin());
    }
  }
  return result;
}

}  // namespace lockstep::grpc_service
