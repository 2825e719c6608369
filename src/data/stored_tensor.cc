#include "data/stored_tensor.h"

#include <ATen/ops/empty.h>

#include <cstring>

#include "base/text.h"
#include "lockstep/error.h"

namespace lockstep {

DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::float32;
    case at::kDouble: return DType::float64;
    case at::kHalf: return DType::float16;
    case at::kBFloat16: return DType::bfloat16;
    case at::kInt: return DType::int32;
    case at::kLong: return DType::int64;
    case at::kByte: return DType::uint8;
    default:
      throw InvalidArgument(
          text("a tensor has dtype ", type, "; allowed are float, double, half, bfloat16, int, long and byte"));
  }
}

at::ScalarType to_scalar_type(DType dtype) {
  switch (dtype) {
    case DType::float32: return at::kFloat;
    case DType::float64: return at::kDouble;
    case DType::float16: return at::kHalf;
    case DType::bfloat16: return at::kBFloat16;
    case DType::int32: return at::kInt;
    case DType::int64: return at::kLong;
    case DType::uint8: return at::kByte;
  }
  throw InvalidArgument(text("DType ", static_cast<int>(dtype), " does not exist"));
}

at::ScalarType stored_type(at::ScalarType type) {
  if (type == at::kBool) return at::kByte;
  return type == at::kChar || type == at::kShort ? at::kInt : type;
}

Buffer buffer_of_tensor(const Tensor& tensor) {
  return {tensor.mutable_data_ptr(), static_cast<std::size_t>(tensor.numel()), to_dtype(tensor.scalar_type())};
}

StoredTensor to_stored(const Tensor& tensor) {
  const auto plain = tensor.detach().cpu().to(stored_type(tensor.scalar_type())).contiguous();
  StoredTensor stored{to_dtype(plain.scalar_type()), plain.sizes().vec(), std::vector<std::byte>(plain.nbytes())};
  if (plain.nbytes() > 0) std::memcpy(stored.bytes.data(), plain.const_data_ptr(), plain.nbytes());
  return stored;
}

Tensor from_stored(const StoredTensor& stored) {
  auto tensor = at::empty(stored.shape, to_scalar_type(stored.dtype));
  if (tensor.nbytes() > 0) std::memcpy(tensor.mutable_data_ptr(), stored.bytes.data(), tensor.nbytes());
  return tensor;
}

}  // namespace lockstep
