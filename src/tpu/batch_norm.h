// Batch normalization of a batch of which some examples do not count.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/parameter_hook.h"

namespace lockstep::tpu {

// Computes a call of aten::batch_norm by operators that have gradients, and updates its running statistics. counts: 1
// for each row of the input that counts, else 0; undefined where all do.
at::Tensor batch_norm(const ops::OperatorCall& call, const at::Tensor& counts);

// The dimensions but channels of x [batch, channels, ...]; and a value a channel, shaped to broadcast along x.
std::vector<std::int64_t> all_but_channels(std::int64_t rank);
at::Tensor along_channels(const at::Tensor& values, const at::Tensor& x);  // values: [channels]

}  // namespace lockstep::tpu
