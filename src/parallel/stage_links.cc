#include "parallel/stage_links.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"

namespace lockstep::parallel {

namespace {

constexpr std::size_t kMostDimensions = 12;

// The header that goes before each tensor.
struct Header {
  StageMessage message;
  std::int64_t dtype, dimensions;
  std::int64_t sizes[kMostDimensions];
};

Buffer bytes_of(Header& header) { return {&header, sizeof header, DType::uint8}; }
Buffer bytes_of(const Tensor& tensor) {
  const auto device = tensor.is_cuda() ? MemoryDevice{MemoryDevice::Type::cuda, tensor.get_device()} : MemoryDevice();
  return {tensor.mutable_data_ptr(), tensor.nbytes(), DType::uint8, device};
}

Header header_of(const StageMessage& message, const Tensor& tensor) {
  if (tensor.dim() > static_cast<std::int64_t>(kMostDimensions)) {
    throw InvalidArgument(text("Pipeline: the output of stage ", message.stage, " has ", tensor.dim(),
                               " dimensions; at most ", kMostDimensions, " are allowed"));
  }
  Header header{message, static_cast<std::int64_t>(tensor.scalar_type()), tensor.dim(), {}};
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), header.sizes);
  return header;
}

}  // namespace

StageLinks::StageLinks(const Communicator& ranks, const std::vector<std::pair<int, int>>& pairs) : ranks_(ranks) {
  for (const auto& [from, to] : pairs) {
    const bool is_mine = ranks.rank() == from || ranks.rank() == to;
    const auto group = ranks.group().split(is_mine ? 0 : -1, ranks.rank() == from ? 0 : 1, ranks.deadline());
    if (!is_mine) continue;
    own_pairs_.emplace_back(from, to);
    (ranks.rank() == from ? to_ : from_).emplace(ranks.rank() == from ? to : from, Link{ranks.with_group(*group)});
  }
}

StageLinks::Link& StageLinks::link_of(const std::pair<int, int>& pair) {
  return ranks_.rank() == pair.first ? to_.at(pair.second) : from_.at(pair.first);
}

void StageLinks::use(at::Device device) {
  if (device.is_cuda() && !reach_gpus_) connect(device);
  device_ = device.is_cuda() && *reach_gpus_ ? device : at::Device(at::kCPU);
}

// Ranks come to their links in one order, so that each link finds both sides there. The first message of NCCL has the
// hosts of both sides wait for each other, so an element is sent before the schedule's messages.
void StageLinks::connect(at::Device device) {
  bool reaches = true;
  for (const auto& pair : own_pairs_) {
    auto& [headers, tensors] = link_of(pair);
    tensors = headers.with_group(*headers.group().split(0, headers.rank(), headers.deadline()));
    const MemoryDevice memory{MemoryDevice::Type::cuda, device.index()};
    reaches = tensors->group().reaches(memory, headers.deadline()) && reaches;
  }
  reach_gpus_ = ranks_.all(reaches);
  for (const auto& pair : own_pairs_) {
    auto& tensors = link_of(pair).tensors;
    const auto element = at::zeros({1}, at::TensorOptions(device));
    const bool sends = ranks_.rank() == pair.first;
    const auto call = sends ? Call::send(buffer_of(element), 1) : Call::recv(buffer_of(element), 0);
    if (*reach_gpus_) {
      tensors->group().run(on_stream_of(element, call), tensors->deadline());
    } else {
      tensors.reset();
    }
  }
}

void StageLinks::send(int to, const StageMessage& message, const Tensor& tensor) {
  const auto sent = tensor.detach().to(device_).contiguous();
  const auto memory = std::make_shared<std::pair<Header, Tensor>>(header_of(message, sent), sent);
  while (!sent_.empty() && sent_.front().work.done()) {
    sent_.front().work.wait();
    sent_.pop_front();
  }
  const auto& link = to_.at(to);
  const auto start = [&](const Communicator& among, const Call& call) {
    sent_.push_back({among.group().start(call, among.deadline()), memory});
  };
  start(link.headers, Call::send(bytes_of(memory->first), 1));
  if (sent.nbytes() > 0) start(tensors_of(link), on_stream_of(sent, Call::send(bytes_of(sent), 1)));
}

Tensor StageLinks::receive_next(const Link& link, StageMessage& message) const {
  Header header{};
  link.headers.group().recv(bytes_of(header), 0, link.headers.deadline());
  message = header.message;
  const at::IntArrayRef sizes(header.sizes, static_cast<std::size_t>(header.dimensions));
  auto tensor = at::empty(sizes, at::TensorOptions(device_).dtype(static_cast<at::ScalarType>(header.dtype)));
  const auto& tensors = tensors_of(link);
  const auto call = on_stream_of(tensor, Call::recv(bytes_of(tensor), 0));
  if (tensor.nbytes() > 0) tensors.group().run(call, tensors.deadline());
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
    for (const auto& [rank, link] : *links) {
      link.headers.group().abort(reason);
      if (link.tensors) link.tensors->group().abort(reason);
    }
  }
}

}  // namespace lockstep::parallel
