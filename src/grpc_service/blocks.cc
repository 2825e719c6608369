#include "grpc_service/blocks.h"

#include <sodium.h>

namespace lockstep::grpc_service {

std::int64_t Blocks::add(std::shared_ptr<parameter_server::SharedBlock> block) {
  std::uint64_t number = 0;
  randombytes_buf(&number, sizeof(number));
  const auto positive = static_cast<std::int64_t>(number >> 1);
  MutexLock lock(mutex_);
  blocks_[positive] = std::move(block);
  return positive;
}

void Blocks::remove(std::int64_t number) {
  MutexLock lock(mutex_);
  blocks_.erase(number);
}

std::shared_ptr<parameter_server::SharedBlock> Blocks::find(std::int64_t number) const {
  MutexLock lock(mutex_);
  const auto found = blocks_.find(number);
  return found == blocks_.end() ? nullptr : found->second;
}

}  // namespace lockstep::grpc_service
