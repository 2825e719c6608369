// Tensors over a Group: any device, any memory format.
#pragma once

#include "lockstep/group.h"
#include "lockstep/tensor.h"

namespace lockstep {

// A new tensor on value's device. All ranks' have one shape and dtype.
Tensor all_reduce(const Group& group, ReduceOp op, const Tensor& value, Deadline deadline);

// The ranks' tensors one after the other along `axis`, where their sizes may differ. Throws InvalidArgument for a
// scalar.
Tensor all_gather(const Group& group, const Tensor& value, std::int64_t axis, Deadline deadline);

}  // namespace lockstep
