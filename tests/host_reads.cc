#include "tests/host_reads.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>

#include "tests/simulated_gpu/cuda_runtime.h"

namespace lockstep {
namespace {

std::atomic<std::int64_t> items = 0;

c10::Scalar item_of(const at::Tensor& tensor) {
  ++items;
  const auto* const gpus = c10::impl::getDeviceGuardImpl(c10::kCUDA);
  gpus->synchronizeStream(gpus->getStream(tensor.device()));
  return at::from_blob(simulated_gpu_memory(tensor.const_data_ptr()), {}, at::TensorOptions(tensor.scalar_type()))
      .item();
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("_local_scalar_dense", &item_of); }

}  // namespace

std::int64_t host_reads() { return simulated_gpu_copies_to_host() + items; }

}  // namespace lockstep
