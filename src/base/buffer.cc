#include "lockstep/base/buffer.h"

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep {

std::size_t size_of(DType dtype) {
  constexpr std::size_t kSizes[] = {4, 8, 2, 2, 4, 8, 1, 1, 2, 1};  // in the order of DType
  static_assert(std::size(kSizes) == kDTypes);
  if (static_cast<std::size_t>(dtype) < std::size(kSizes)) return kSizes[static_cast<std::size_t>(dtype)];
  throw InvalidArgument(text("DType ", static_cast<int>(dtype), " does not exist"));
}

const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"float32", "float64", "float16", "bfloat16", "int32",
                                    "int64",   "uint8",   "int8",    "int16",    "bool"};
  static_assert(std::size(kNames) == kDTypes);
  return static_cast<std::size_t>(dtype) < std::size(kNames) ? kNames[static_cast<std::size_t>(dtype)] : "unknown";
}

const char* name_of(ReduceOp op) {
  constexpr const char* kNames[] = {"sum", "mean", "min", "max", "product"};
  static_assert(std::size(kNames) == static_cast<std::size_t>(ReduceOp::product) + 1);
  return static_cast<std::size_t>(op) < std::size(kNames) ? kNames[static_cast<std::size_t>(op)] : "unknown";
}

std::string name_of(MemoryDevice device) {
  return device.type == MemoryDevice::Type::host ? "host" : "cuda:" + std::to_string(device.index);
}

}  // namespace lockstep
