#include "grpc_service/receive_buffers.h"

#include <algorithm>
#include <bit>

namespace lockstep::grpc_service {

namespace {

// Rounds up by at most an eighth, so that a buffer serves calls of nearly equal sizes.
std::size_t rounded(std::size_t bytes) {
  const auto unit = std::max<std::size_t>(64, std::bit_ceil(bytes) / 16);
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

std::shared_ptr<std::byte[]> ReceiveBuffers::take(std::size_t size) {
  const auto bytes = rounded(size);
  std::unique_ptr<std::byte[]> memory;
  {
    MutexLock lock(state_->mutex);
    auto& free = state_->free;
    const auto found = std::find_if(free.rbegin(), free.rend(), [&](const auto& kept) { return kept.bytes == bytes; });
    if (found != free.rend()) {
      memory = std::move(found->memory);
      free.erase(std::prev(found.base()));
    }
  }
  if (memory == nullptr) memory.reset(new std::byte[bytes]);
  return {memory.release(), [state = state_, bytes](std::byte* given) {
            std::unique_ptr<std::byte[]> back(given);
            MutexLock lock(state->mutex);
            if (state->free.size() == State::kMost) state->free.erase(state->free.begin());
            state->free.push_back({bytes, std::move(back)});
          }};
}

}  // namespace lockstep::grpc_service
