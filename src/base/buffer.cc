#include "lockstep/base/buffer.h"

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep {

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64: return 8;
    case DType::float32:
    case DType::int32: return 4;
    case DType::float16:
    case DType::bfloat16:
    case DType::int16: return 2;
    case DType::uint8:
    case DType::int8:
    case DType::boolean: return 1;
  }
  throw InvalidArgument(text("DType ", static_cast<int>(dtype), " does not exist"));
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float32: return "float32";
    case DType::float64: return "float64";
    case DType::float16: return "float16";
    case DType::bfloat16: return "bfloat16";
    case DType::int32: return "int32";
    case DType::int64: return "int64";
    case DType::uint8: return "uint8";
    case DType::int8: return "int8";
    case DType::int16: return "int16";
    case DType::boolean: return "bool";
  }
  return "unknown";
}

const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return "sum";
    case ReduceOp::mean: return "mean";
    case ReduceOp::min: return "min";
    case ReduceOp::max: return "max";
    case ReduceOp::product: return "product";
  }
  return "unknown";
}

std::string name_of(MemoryDevice device) {
  return device.type == MemoryDevice::Type::host ? "host" : "cuda:" + std::to_string(device.index);
}

}  // namespace lockstep
