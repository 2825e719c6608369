#include "lockstep/gradient/tensor_collectives.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <map>

#include "base/text.h"
#include "gradient/device_of_sums.h"
#include "lockstep/base/error.h"
#include "ops/parameter_hook.h"
#include "ops/tensors.h"

namespace lockstep {
namespace {

void check(const char* caller, const Tensor& tensor) {
  if (!tensor.defined()) throw InvalidArgument(text(caller, ": the tensor is undefined"));
  if (tensor.layout() != at::kStrided)
    throw InvalidArgument(text(caller, ": the tensor is sparse; make it dense first"));
}

// The tensor itself, or a copy, contiguous and where a Group can move it: on the CPU or on a GPU.
Tensor movable(const char* caller, const Tensor& tensor) {
  check(caller, tensor);
  const ops::WithoutHooks reading(tensor);
  const auto values = tensor.detach();
  return (values.is_cpu() || values.is_cuda() ? values : values.to(at::kCPU)).contiguous();
}

MemoryDevice memory_device(const Tensor& tensor) {
  return tensor.is_cuda() ? MemoryDevice{MemoryDevice::Type::cuda, tensor.get_device()} : MemoryDevice();
}

bool has_memory_of(const Tensor& a, const Tensor& b) {
  return a.unsafeGetTensorImpl()->unsafe_storage().data() == b.unsafeGetTensorImpl()->unsafe_storage().data();
}

// Runs the call that `make_call` makes of the tensor's memory or, where a Group cannot use that, of a copy that is
// written back.
template <class MakeCall>
void in_place(const char* caller, const Group& group, const Tensor& tensor, Deadline deadline,
              const MakeCall& make_call) {
  const at::NoGradGuard no_gradient;
  const auto moved = movable(caller, tensor);
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    throw InvalidArgument(text(caller, ": the tensor of shape ", tensor.sizes(), " has strides ", tensor.strides(),
                               ", so that elements share memory and cannot be written; clone it first"));
  }
  group.run(on_stream_of(moved, make_call(buffer_of(moved))), deadline);
  if (!has_memory_of(moved, tensor)) tensor.detach().copy_(moved);
}

struct BySizes {
  using is_transparent = void;  // so that a look-up makes no vector
  bool operator()(at::IntArrayRef a, at::IntArrayRef b) const { return std::ranges::lexicographical_compare(a, b); }
};

constexpr std::int64_t kAnySize = -1;

// Ranks' calls agree where their tensors have one shape, but for dimensions of kAnySize. Naming a shape takes a lock:
// each thread remembers some.
Purpose purpose_of(at::IntArrayRef sizes) {
  constexpr std::size_t kMostShapes = 1024;
  thread_local std::map<std::vector<std::int64_t>, Purpose, BySizes> named;
  const auto found = named.find(sizes);
  if (found != named.end()) return found->second;
  if (named.size() == kMostShapes) named.clear();
  const bool any = std::ranges::find(sizes, kAnySize) != sizes.end();
  const Purpose purpose(any ? text("tensors of shape ", sizes, ", where ", kAnySize, " may differ")
                            : text("a tensor of shape ", sizes));
  return named.emplace(sizes.vec(), purpose).first->second;
}

Call for_tensor(const Tensor& tensor, Call call) {
  call.purpose = purpose_of(tensor.sizes());
  return call;
}

// Runs a call whose buffers are of tensors on the device of `input`.
void run(const Group& group, const Call& call, const Tensor& input, Deadline deadline) {
  group.run(on_stream_of(input, call), deadline);
}

std::vector<std::int64_t> part_of_rows(const char* caller, const Tensor& tensor, int ranks) {
  if (tensor.dim() == 0 || tensor.size(0) % ranks != 0) {
    throw InvalidArgument(text(caller, ": the tensor has shape ", tensor.sizes(),
                               "; its first dimension must be a multiple of the number of ranks, ", ranks));
  }
  auto sizes = tensor.sizes().vec();
  sizes[0] /= ranks;
  return sizes;
}

}  // namespace

Call on_stream_of(const Tensor& tensor, Call call) {
  if (!tensor.is_cuda()) return call;
  const auto* const devices = c10::impl::getDeviceGuardImpl(c10::kCUDA);
  call.stream = devices->getStreamNativeHandle(devices->getStream(tensor.device()));
  return call;
}

Buffer buffer_of(const Tensor& tensor) {
  check("buffer_of", tensor);
  if (!(tensor.is_cpu() || tensor.is_cuda()) || !tensor.is_contiguous()) {
    throw InvalidArgument(text("buffer_of: the tensor is on ", tensor.device().str(), " and has shape ", tensor.sizes(),
                               " and strides ", tensor.strides(),
                               "; it must be contiguous and on the CPU or a CUDA device"));
  }
  return {tensor.mutable_data_ptr(), static_cast<std::size_t>(tensor.numel()), ops::dtype_of(tensor.scalar_type()),
          memory_device(tensor)};
}

void all_reduce(const Group& group, const Tensor& tensor, ReduceOp op, Deadline deadline) {
  in_place("all_reduce", group, tensor, deadline,
           [&](const Buffer& buffer) { return for_tensor(tensor, Call::all_reduce(buffer, op)); });
}

void broadcast(const Group& group, const Tensor& tensor, int root, Deadline deadline) {
  in_place("broadcast", group, tensor, deadline,
           [&](const Buffer& buffer) { return for_tensor(tensor, Call::broadcast(buffer, root)); });
}

void broadcast(const Communicator& ranks, const std::vector<Tensor>& tensors, int root) {
  for (const auto& tensor : tensors) check("broadcast", tensor);
  if (ranks.size() > 1 && !tensors.empty()) broadcast(ranks, tensors, root, gradient::device_of_sums(ranks, tensors));
}

void broadcast(const Communicator& ranks, const std::vector<Tensor>& tensors, int root, at::Device by) {
  if (ranks.size() == 1) return;
  const at::NoGradGuard no_gradient;
  for (const auto& tensor : tensors) {
    const auto moved = movable("broadcast", tensor).to(by);
    auto call = Call::broadcast({moved.mutable_data_ptr(), moved.nbytes(), DType::uint8, memory_device(moved)}, root);
    call.purpose = ranks.purpose().told() ? ranks.purpose() : purpose_of(tensor.sizes());
    run(ranks.group(), call, moved, ranks.deadline());
    if (ranks.rank() != root && !has_memory_of(moved, tensor)) tensor.detach().copy_(moved);
  }
}

void recv(const Group& group, const Tensor& tensor, int from, Deadline deadline) {
  in_place("recv", group, tensor, deadline, [&](const Buffer& buffer) { return Call::recv(buffer, from); });
}

void send(const Group& group, const Tensor& tensor, int to, Deadline deadline) {
  const auto moved = movable("send", tensor);
  run(group, Call::send(buffer_of(moved), to), moved, deadline);
}

Tensor all_gather(const Group& group, const Tensor& tensor, Deadline deadline, std::int64_t dim) {
  check("all_gather", tensor);
  if (tensor.dim() == 0) {
    throw InvalidArgument("all_gather: the tensor is a scalar; it needs a dimension to gather along");
  }
  if (dim < -tensor.dim() || dim >= tensor.dim()) {
    throw InvalidArgument(
        text("all_gather: dim is ", dim, "; the tensor has the dimensions ", -tensor.dim(), " to ", tensor.dim() - 1));
  }
  const at::NoGradGuard no_gradient;
  // Sizes along the dimension may differ: they are gathered first, and parts are padded to the largest.
  auto padded_sizes = tensor.sizes().vec();
  auto& gathered_size = padded_sizes[static_cast<std::size_t>(at::maybe_wrap_dim(dim, tensor.dim()))];
  gathered_size = kAnySize;
  const auto size = at::scalar_tensor(tensor.size(dim), at::kLong);
  const auto sizes = at::empty({group.size()}, at::kLong);
  auto call = Call::all_gather(buffer_of(size), buffer_of(sizes));
  call.purpose = purpose_of(padded_sizes);
  group.run(call, deadline);
  gathered_size = sizes.max().item<std::int64_t>();
  const auto input = at::zeros(padded_sizes, movable("all_gather", tensor.narrow(dim, 0, 0)).options());
  input.narrow(dim, 0, tensor.size(dim)).copy_(tensor.detach());
  const auto output = at::empty({group.size(), input.numel()}, input.options());
  run(group, Call::all_gather(buffer_of(input), buffer_of(output)), input, deadline);
  std::vector<Tensor> parts;
  for (int r = 0; r < group.size(); ++r) {
    parts.push_back(output.select(0, r).view(padded_sizes).narrow(dim, 0, sizes[r].item<std::int64_t>()));
  }
  return at::cat(parts, dim).to(tensor.device());
}

Tensor reduce_scatter(const Group& group, const Tensor& tensor, ReduceOp op, Deadline deadline) {
  const auto input = movable("reduce_scatter", tensor);
  const auto output = at::empty(part_of_rows("reduce_scatter", tensor, group.size()), input.options());
  run(group, for_tensor(tensor, Call::reduce_scatter(buffer_of(input), buffer_of(output), op)), input, deadline);
  return output.to(tensor.device());
}

Tensor all_to_all(const Group& group, const Tensor& tensor, Deadline deadline) {
  const auto input = movable("all_to_all", tensor);
  part_of_rows("all_to_all", tensor, group.size());
  const auto output = at::empty(input.sizes(), input.options());
  run(group, for_tensor(tensor, Call::all_to_all(buffer_of(input), buffer_of(output))), input, deadline);
  return output.to(tensor.device());
}

}  // namespace lockstep
