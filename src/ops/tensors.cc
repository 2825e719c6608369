#include "ops/tensors.h"

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::ops {

DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::float32;
    case at::kDouble: return DType::float64;
    case at::kHalf: return DType::float16;
    case at::kBFloat16: return DType::bfloat16;
    case at::kInt: return DType::int32;
    case at::kLong: return DType::int64;
    case at::kByte: return DType::uint8;
    case at::kChar: return DType::int8;
    case at::kShort: return DType::int16;
    case at::kBool: return DType::boolean;
    default:
      throw InvalidArgument(text("a tensor has dtype ", type,
                                 "; allowed are float, double, half, bfloat16, int, long, byte, char, short and bool"));
  }
}

at::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::float32: return at::kFloat;
    case DType::float64: return at::kDouble;
    case DType::float16: return at::kHalf;
    case DType::bfloat16: return at::kBFloat16;
    case DType::int32: return at::kInt;
    case DType::int64: return at::kLong;
    case DType::uint8: return at::kByte;
    case DType::int8: return at::kChar;
    case DType::int16: return at::kShort;
    case DType::boolean: return at::kBool;
  }
  throw InvalidArgument(text("DType ", static_cast<int>(dtype), " does not exist"));
}

std::vector<at::Tensor> defined_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> defined;
  for (const auto& tensor : tensors)
    if (tensor.defined()) defined.push_back(tensor);
  return defined;
}

std::vector<std::int64_t> shapes_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::int64_t> shapes;
  for (const auto& tensor : tensors) {
    shapes.push_back(tensor.defined() ? static_cast<std::int64_t>(tensor.scalar_type()) : -1);
    if (!tensor.defined()) continue;
    shapes.push_back(tensor.dim());
    shapes.insert(shapes.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  return shapes;
}

}  // namespace lockstep::ops
