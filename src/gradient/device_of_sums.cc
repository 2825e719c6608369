#include "gradient/device_of_sums.h"

#include <algorithm>

namespace lockstep::gradient {

at::Device device_of_sums(const Communicator& ranks, const std::vector<at::Tensor>& tensors) {
  const auto first = tensors.empty() ? at::Device(at::kCPU) : tensors[0].device();
  const bool is_one_gpu =
      first.is_cuda() && std::ranges::all_of(tensors, [&](const auto& tensor) { return tensor.device() == first; });
  if (!ranks.all(is_one_gpu)) return at::kCPU;
  return ranks.group().reaches({MemoryDevice::Type::cuda, first.index()}, ranks.deadline()) ? first : at::kCPU;
}

}  // namespace lockstep::gradient
