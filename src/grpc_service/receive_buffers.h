// Memory for what calls receive and send, used again: new pages cost as much as copying into them.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/mutex.h"

namespace lockstep::grpc_service {

// Any thread. What it gave out may outlive it.
class ReceiveBuffers {
 public:
  // Not initialized. Given back with the last copy.
  std::shared_ptr<std::byte[]> take(std::size_t bytes);

 private:
  struct Free {
    std::size_t bytes;
    std::unique_ptr<std::byte[]> memory;
  };
  struct State {
    static constexpr std::size_t kMost = 8;  // that are kept
    Mutex mutex;
    std::vector<Free> free LOCKSTEP_GUARDED_BY(mutex);  // the one that was given back last is the last
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace lockstep::grpc_service
