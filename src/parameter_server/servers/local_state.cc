#include "parameter_server/servers/follow_chief.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/text.h"
#include "gradient/tensor_hash.h"
#include "lockstep/base/error.h"

namespace lockstep::servers {
namespace {

Tensor tensor_of(const std::string& bytes, const Tensor& like) {
  auto tensor = at::empty(like.sizes(), like.scalar_type());
  if (bytes.size() != tensor.nbytes()) {
    throw InvalidArgument(text("a worker reported ", bytes.size(), " bytes of a buffer of ", tensor.nbytes()));
  }
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

}  // namespace

ChangedBuffers::ChangedBuffers(const ReplicatedParameters& parameters) : parameters_(parameters) {
  for (std::size_t i = 0; i < parameters.buffer_names().size(); ++i) {
    auto& of_buffer = hashes_.emplace_back();
    for (int replica = 0; replica < parameters.replicas(); ++replica)
      of_buffer.push_back(gradient::hash_of(parameters.buffer(replica, i)));
  }
}

std::map<int, std::string> ChangedBuffers::take() {
  std::map<int, std::string> changed;
  const auto add = [&](std::size_t number, const Tensor& tensor) {
    changed[static_cast<int>(number)] = {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
  };
  std::vector<bool> differ(hashes_.size());
  for (std::size_t i = 0; i < hashes_.size(); ++i) {
    for (int replica = 0; replica < parameters_.replicas(); ++replica) {
      auto& before = hashes_[i][static_cast<std::size_t>(replica)];
      const auto hash = gradient::hash_of(parameters_.buffer(replica, i));
      if (std::exchange(before, hash) != hash) differ[i] = true;
    }
  }
  if (std::find(differ.begin(), differ.end(), true) == differ.end()) return changed;
  const auto averages = parameters_.average_buffers();
  for (std::size_t i = 0; i < averages.size(); ++i) {
    if (differ[i]) add(i, averages[i].cpu().contiguous());
  }
  const auto& seen = parameters_.seen();
  add(hashes_.size(), at::scalar_tensor(std::accumulate(seen.begin(), seen.end(), 0.0), at::kDouble));
  return changed;
}

void load_reported_buffers(ReplicatedParameters& parameters,
                           const std::map<int, std::map<int, std::string>>& by_worker) {
  const auto count = parameters.buffer_names().size();
  for (std::size_t i = 0; i < count; ++i) {
    const auto& own = parameters.buffer(0, i);
    Tensor sum, most;
    double all = 0, largest = -1;
    for (const auto& [worker, buffers] : by_worker) {
      const auto found = buffers.find(static_cast<int>(i));
      const auto counted = buffers.find(static_cast<int>(count));
      if (found == buffers.end() || counted == buffers.end()) continue;
      const auto value = tensor_of(found->second, own);
      const double seen = tensor_of(counted->second, at::empty({}, at::kDouble)).item<double>();
      if (seen > largest) {
        largest = seen;
        most = value;
      }
      all += seen;
      if (own.is_floating_point())
        sum = (sum.defined() ? sum : at::zeros(own.sizes(), at::kDouble)) + value.to(at::kDouble) * seen;
    }
    if (!most.defined()) continue;
    parameters.assign_buffer(i, sum.defined() && all > 0 ? sum / all : most);
  }
}

}  // namespace lockstep::servers
