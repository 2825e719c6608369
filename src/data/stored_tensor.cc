#include "data/stored_tensor.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ne.h>

#include <cstring>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "ops/tensors.h"

namespace lockstep::data {

StoredTensor to_stored(const Tensor& tensor) {
  const auto plain = tensor.detach().cpu().contiguous();
  StoredTensor stored{ops::dtype_of(plain.scalar_type()), plain.sizes().vec(), std::vector<std::byte>(plain.nbytes())};
  if (plain.nbytes() > 0) std::memcpy(stored.bytes.data(), plain.const_data_ptr(), plain.nbytes());
  return stored;
}

Tensor from_stored(const StoredTensor& stored) {
  auto tensor = at::empty(stored.shape, ops::scalar_type_of(stored.dtype));
  if (tensor.nbytes() > 0) std::memcpy(tensor.mutable_data_ptr(), stored.bytes.data(), tensor.nbytes());
  if (stored.dtype == DType::boolean) tensor.view(at::kByte).ne_(0);  // a bool's byte must be 0 or 1
  return tensor;
}

}  // namespace lockstep::data
