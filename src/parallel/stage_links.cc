#include "parallel/stage_links.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/text.h"

namespace lockstep::parallel {
namespace {

constexpr std::size_t kMostDimensions = 12;

// The header that goes before each tensor.
struct Header {
  std::int64_t kind, stage, microbatch, dtype, dimensions;
  std::int64_t sizes[kMostDimensions];
};

Buffer bytes_of(Header& header) { return {&header, sizeof header, DType::uint8}; }
Buffer bytes_of(const Tensor& tensor) { return {tensor.mutable_data_ptr(), tensor.nbytes(), DType::uint8}; }

Header header_of(const StageMessage& message, const Tensor& tensor) {
  if (tensor.dim() > static_cast<std::int64_t>(kMostDimensions)) {
    throw InvalidArgument(text("Pipeline: the output of stage ", message.stage, " has ", tensor.dim(),
                               " dimensions; at most ", kMostDimensions, " are allowed"));
  }
  Header header{static_cast<std::int64_t>(message.kind),         message.stage, message.microbatch,
                static_cast<std::int64_t>(tensor.scalar_type()), tensor.dim(),  {}};
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), header.sizes);
  return header;
}

}  // namespace

StageLinks::StageLinks(const Communicator& ranks, const std::vector<std::pair<int, int>>& pairs) : ranks_(ranks) {
  for (const auto& [from, to] : pairs) {
    const bool is_mine = ranks.rank() == from || ranks.rank() == to;
    const auto group = ranks.group().split(is_mine ? 0 : -1, ranks.rank() == from ? 0 : 1, ranks.deadline());
    if (!is_mine) continue;
    (ranks.rank() == from ? to_ : from_).emplace(ranks.rank() == from ? to : from, ranks.with_group(*group));
  }
}

void StageLinks::send(int to, const StageMessage& message, const Tensor& tensor) {
  const auto host = tensor.detach().to(at::kCPU).contiguous();
  const auto memory = std::make_shared<std::pair<Header, Tensor>>(header_of(message, host), host);
  while (!sent_.empty() && sent_.front().work.done()) {
    sent_.front().work.wait();
    sent_.pop_front();
  }
  const auto& link = to_.at(to);
  std::vector<Call> calls{Call::send(bytes_of(memory->first), 1)};
  if (host.nbytes() > 0) calls.push_back(Call::send(bytes_of(memory->second), 1));
  sent_.push_back({link.group().start(std::move(calls), link.deadline()), memory});
}

Tensor StageLinks::receive_next(const Communicator& link, StageMessage& message) const {
  Header header{};
  link.group().recv(bytes_of(header), 0, link.deadline());
  message = {static_cast<StageMessage::Kind>(header.kind), static_cast<int>(header.stage),
             static_cast<int>(header.microbatch)};
  const at::IntArrayRef sizes(header.sizes, static_cast<std::size_t>(header.dimensions));
  auto tensor = at::empty(sizes, static_cast<at::ScalarType>(header.dtype));
  if (tensor.nbytes() > 0) link.group().recv(bytes_of(tensor), 0, link.deadline());
  return tensor;
}

Tensor StageLinks::receive(int from, const StageMessage& message) {
  while (true) {
    const auto found = kept_.find({from, message});
    if (found != kept_.end()) return std::move(kept_.extract(found).mapped());
    StageMessage next;
    auto tensor = receive_next(from_.at(from), next);
    kept_.emplace(std::pair(from, next), std::move(tensor));
  }
}

void StageLinks::flush() {
  for (const auto& sent : sent_) sent.work.wait();
  sent_.clear();
  kept_.clear();
}

void StageLinks::abort(const std::string& reason) const {
  // Not Communicator::abort, which would name this rank by its number on the link.
  for (const auto* const links : {&to_, &from_}) {
    for (const auto& [rank, link] : *links) link.group().abort(reason);
  }
}

}  // namespace lockstep::parallel
