// Memory that processes share with a server: the server's view of all blocks, and a process's view of its own.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "parameter_server/grpc_service/caller.h"
#include "parameter_server/grpc_service/frames.h"
#include "parameter_server/grpc_service/messages.pb.h"
#include "parameter_server/shared_block.h"

namespace lockstep::grpc_service {

// The memory that other processes share with this server. Any thread.
class Blocks {
 public:
  // Its number, which is random: only who shared a block can name it.
  std::int64_t add(std::shared_ptr<parameter_server::SharedBlock> block);
  void remove(std::int64_t number);

  // Null where there is none, as after this process was started again.
  std::shared_ptr<parameter_server::SharedBlock> find(std::int64_t number) const;

 private:
  mutable Mutex mutex_;
  std::map<std::int64_t, std::shared_ptr<parameter_server::SharedBlock>> blocks_ LOCKSTEP_GUARDED_BY(mutex_);
};

// The blocks of this process's memory that it shares with one server. Any thread.
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
    std::int64_t number = -1;           // on the server; -1 where the server cannot access the block
    std::shared_ptr<void> stream = {};  // the server forgets the block when this ends
  };
  void share(Block& block, Deadline deadline);
  std::int64_t generation() const;

  // Unless another thread has done so since the generation was `known`.
  void share_again(std::int64_t known, Deadline deadline);

  Caller& server_;
  mutable Mutex mutex_;
  std::vector<Block> blocks_ LOCKSTEP_GUARDED_BY(mutex_);
  std::int64_t generation_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // how often blocks were shared again
};

}  // namespace lockstep::grpc_service
