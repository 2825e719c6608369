// The precision in which models compute. Names are those of keras.mixed_precision. Torch-free; any thread may call.
#pragma once

#include <string>

namespace lockstep {

// For models (Model, Sequential) that are made from now on; a loop of your own uses LibTorch's autocast:
//   "float32"         as tensors are (the default)
//   "mixed_bfloat16"  variables, losses and updates in float32; matrix products and convolutions in bfloat16, as
//                     LibTorch's autocast chooses them; outputs come as float32
//   "mixed_float16"   the same in float16, on GPUs only; compile wraps the optimizer in a LossScaleOptimizer
// Throws InvalidArgument for any other name. keras.mixed_precision.set_global_policy.
void set_global_policy(const std::string& name);

std::string global_policy();

}  // namespace lockstep
