#include "parameter_server/grpc_service/shared_blocks.h"

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

bool SharedBlocks::add(std::shared_ptr<parameter_server::SharedBlock> block, Deadline deadline) {
  Block added{.block = std::move(block)};
  share(added, deadline);
  MutexLock lock(mutex_);
  return blocks_.emplace_back(std::move(added)).number >= 0;
}

void SharedBlocks::share(Block& block, Deadline deadline) {
  const auto handle = block.block->handle();
  Request request;
  auto& head = *request.mutable_share();
  head.set_process(handle.process);
  head.set_file(handle.descriptor);
  head.set_bytes(handle.bytes);
  head.set_nonce(handle.nonce);
  const auto context = std::make_shared<grpc::ClientContext>();
  Reply reply;
  const std::shared_ptr<ClientStream> stream = server_.open(request, *context, reply, deadline);
  block.number = -1;
  block.stream = nullptr;
  if (stream == nullptr) return;
  block.stream = {nullptr, [context, stream](void*) {
                    context->TryCancel();
                    stream->Finish();
                  }};
  if (reply.has_block()) {
    block.number = reply.block();
  } else {
    block.stream = nullptr;
  }
}

SharedBlocks::Place SharedBlocks::find(const void* data, std::size_t bytes) const {
  MutexLock lock(mutex_);
  for (const auto& block : blocks_) {
    if (block.number < 0) continue;
    const auto offset = block.block->offset_of(data, bytes);
    if (offset >= 0) return {block.number, offset};
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
  for (auto& block : blocks_) share(block, deadline);
}

std::shared_ptr<const void> SharedBlocks::owner() const {
  const auto all = std::make_shared<std::vector<std::shared_ptr<parameter_server::SharedBlock>>>();
  MutexLock lock(mutex_);
  for (const auto& block : blocks_) all->push_back(block.block);
  return all;
}

}  // namespace lockstep::grpc_service
