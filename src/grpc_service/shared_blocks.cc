#include "grpc_service/shared_blocks.h"

#include <sodium.h>

#include <utility>

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

std::unique_ptr<SharedWith> SharedWith::make(Caller& server, const parameter_server::SharedBlock& block,
                                             Deadline deadline) {
  const auto handle = block.handle();
  Request request;
  auto& head = *request.mutable_share();
  head.set_process(handle.process);
  head.set_file(handle.descriptor);
  head.set_bytes(handle.bytes);
  head.set_nonce(handle.nonce);
  std::unique_ptr<SharedWith> shared(new SharedWith);
  Reply reply;
  shared->stream_ = server.open(request, shared->context_, reply, deadline);
  if (shared->stream_ == nullptr || !reply.has_block()) return nullptr;
  shared->number_ = reply.block();
  return shared;
}

SharedWith::~SharedWith() {
  if (stream_ == nullptr) return;
  context_.TryCancel();
  stream_->Finish();
}

bool SharedBlocks::add(std::shared_ptr<parameter_server::SharedBlock> block, Deadline deadline) {
  auto shared = SharedWith::make(server_, *block, deadline);
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
  for (auto& block : blocks_) block.shared = SharedWith::make(server_, *block.block, deadline);
}

std::shared_ptr<const void> SharedBlocks::owner() const {
  const auto all = std::make_shared<std::vector<std::shared_ptr<parameter_server::SharedBlock>>>();
  MutexLock lock(mutex_);
  for (const auto& block : blocks_) all->push_back(block.block);
  return all;
}

}  // namespace lockstep::grpc_service
