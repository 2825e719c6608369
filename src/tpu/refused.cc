// Operators that no program of fixed shapes can have.
#include "tpu/call.h"

namespace lockstep::tpu {

void add_refused(Lowerings& table) {
  for (const char* const name : {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}) {
    table[name] = [](Call& call) {
      call.refuse(
          "it reads a value of the step, as item() and conditions on tensors do, and values are computed only when the "
          "compiled step runs; compute with tensors (torch::where in place of a condition), and return them from the "
          "step");
    };
  }
  for (const char* const name :
       {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"}) {
    table[name] = [](Call& call) {
      call.refuse(
          "the shape of its result depends on values; a compiled step has fixed shapes: use torch::where, or masks");
    };
  }
}

}  // namespace lockstep::tpu
