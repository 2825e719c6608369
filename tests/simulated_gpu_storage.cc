// More operators for simulated GPUs (simulated_gpu.cc): on tensors' storage, which saving a tensor calls, and those
// that make a sparse tensor of two dense ones and back.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/sparse_dim_native.h>
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

TORCH_LIBRARY_IMPL(aten, SparseCUDA, library) {
  library.impl("_sparse_coo_tensor_with_dims_and_tensors", &at::native::new_with_dims_and_tensor_sparse_symint);
  library.impl("_indices", &at::native::_indices_sparse);
  library.impl("_values", &at::native::_values_sparse);
  library.impl("_nnz", &at::native::_nnz_sparse);
  library.impl("sparse_dim", &at::native::sparse_dim_sparse);
}

}  // namespace
