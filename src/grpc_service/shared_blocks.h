// The blocks of this process's memory that it shares with one server.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "grpc_service/shared_with.h"
#include "grpc_service/status.h"

namespace lockstep::grpc_service {

// Any thread.
class SharedBlocks {
 public:
  explicit SharedBlocks(Caller& server) : server_(server) {}

  // False where the server cannot access the block.
  bool add(std::shared_ptr<parameter_server::SharedBlock> block, Deadline deadline);

  // A place as the server knows it; -1 where the server cannot access the bytes.
  struct Place {
    std::int64_t block = -1, offset = -1;
  };
  Place find(const void* data, std::size_t bytes) const;

  // Calls act() until the server knows the blocks that it names: it may have been started again.
  template <class Act>
  auto call(Deadline deadline, const Act& act) {
    while (true) {
      const auto known = generation();
      try {
        return act();
      } catch (const UnknownBlock&) {
        if (deadline.passed()) throw;
      }
      share_again(known, deadline);
    }
  }

  // Keeps all blocks.
  std::shared_ptr<const void> owner() const;

 private:
  struct Block {
    std::shared_ptr<parameter_server::SharedBlock> block;
    std::unique_ptr<SharedWith> shared;  // null where the server cannot access it
  };
  std::int64_t generation() const;

  // Unless another thread has done so since the generation was `known`.
  void share_again(std::int64_t known, Deadline deadline);

  Caller& server_;
  mutable Mutex mutex_;
  std::vector<Block> blocks_ LOCKSTEP_GUARDED_BY(mutex_);
  std::int64_t generation_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // how often blocks were shared again
};

}  // namespace lockstep::grpc_service
