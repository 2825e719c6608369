#include "grpc_service/shared_blocks.h"

#include <utility>

namespace lockstep::grpc_service {

bool SharedBlocks::add(std::shared_ptr<parameter_server::SharedBlock> block, Deadline deadline) {
  auto shared = SharedWith::make(server_, block, deadline);
  const bool accessible = shared != nullptr;
  MutexLock lock(mutex_);
  blocks_.push_back({std::move(block), std::move(shared)});
  return accessible;
}

SharedBlocks::Place SharedBlocks::find(const void* data, std::size_t bytes) const {
  MutexLock lock(mutex_);
  for (const auto& block : blocks_) {
    if (block.shared == nullptr) continue;
    const auto offset = block.block->offset_of(data, bytes);
    if (offset >= 0) return {block.shared->number(), offset};
  }
  return {};
}

std::int64_t SharedBlocks::generation() const {
  MutexLock lock(mutex_);
  return generation_;
}

void SharedBlocks::share_again(std::int64_t known, Deadline deadline) {
  MutexLock lock(mutex_);
  if (generation_ != known) return;
  ++generation_;
  for (auto& block : blocks_) block.shared = SharedWith::make(server_, block.block, deadline);
}

std::shared_ptr<const void> SharedBlocks::owner() const {
  const auto all = std::make_shared<std::vector<std::shared_ptr<parameter_server::SharedBlock>>>();
  MutexLock lock(mutex_);
  for (const auto& block : blocks_) all->push_back(block.block);
  return all;
}

}  // namespace lockstep::grpc_service
