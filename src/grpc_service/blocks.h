// The memory that other processes share with this server.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "base/mutex.h"
#include "grpc_service/messages.pb.h"
#include "parameter_server/shared_block.h"

namespace lockstep::grpc_service {

// Any thread.
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

}  // namespace lockstep::grpc_service
