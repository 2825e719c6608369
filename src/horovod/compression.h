// How both kinds of DistributedOptimizer read their options.
#pragma once

#include <optional>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/horovod.h"

namespace lockstep::horovod {

inline std::optional<DType> sent_dtype(Compression compression) {
  switch (compression) {
    case Compression::none: return std::nullopt;
    case Compression::fp16: return DType::float16;
    case Compression::bf16: return DType::bfloat16;
  }
  return std::nullopt;
}

inline void check_gradient_op(ReduceOp op) {
  if (op == Average || op == Sum) return;
  throw InvalidArgument(text("DistributedOptimizer: op is ", name_of(op), "; it must be Average or Sum"));
}

}  // namespace lockstep::horovod
