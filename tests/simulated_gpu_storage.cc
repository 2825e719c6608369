// Operators on tensors' storage for simulated GPUs (simulated_gpu.cc), which saving a tensor calls.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace {

at::Tensor& set_storage(at::Tensor& tensor, c10::Storage storage, std::int64_t offset, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  return tensor;
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("set_.source_Storage_storage_offset", &set_storage); }

}  // namespace
