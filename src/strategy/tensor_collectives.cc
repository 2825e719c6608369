#include "strategy/tensor_collectives.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include "data/stored_tensor.h"
#include "lockstep/error.h"

namespace lockstep {
Tensor all_reduce(const Group& group, ReduceOp op, const Tensor& value, Deadline deadline) {
  const auto result = value.detach().to(at::kCPU).clone(at::MemoryFormat::Contiguous);
  group.all_reduce(buffer_of_tensor(result), op, deadline);
  return result.to(value.device());
}

Tensor all_gather(const Group& group, const Tensor& value, std::int64_t axis, Deadline deadline) {
  if (value.dim() == 0)
    throw InvalidArgument("all_gather: the tensor is a scalar; it needs a dimension to gather along");
  // Sizes along the axis may differ: they are gathered first, and parts are padded to the largest.
  const auto size = at::scalar_tensor(value.size(axis), at::kLong);
  const auto sizes = at::empty({group.size()}, at::kLong);
  group.all_gather(buffer_of_tensor(size), buffer_of_tensor(sizes), deadline);
  auto padded_sizes = value.sizes().vec();
  padded_sizes[static_cast<std::size_t>(at::maybe_wrap_dim(axis, value.dim()))] = sizes.max().item<std::int64_t>();
  const auto input = at::zeros(padded_sizes, value.options().device(at::kCPU).requires_grad(false));
  input.narrow(axis, 0, value.size(axis)).copy_(value.detach());
  const auto output = at::empty({group.size(), input.numel()}, input.options());
  group.all_gather(buffer_of_tensor(input), buffer_of_tensor(output), deadline);
  std::vector<Tensor> parts;
  for (int r = 0; r < group.size(); ++r) {
    parts.push_back(output.select(0, r).view(padded_sizes).narrow(axis, 0, sizes[r].item<std::int64_t>()));
  }
  return at::cat(parts, axis).to(value.device());
}

}  // namespace lockstep
