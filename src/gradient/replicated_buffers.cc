// Buffers of replicated modules, such as BatchNorm's running statistics: each replica's own, and their mean. Also
// parameters and buffers as variables of devices that run compiled programs.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>

#include "gradient/replicated_parameters.h"
#include "lockstep/gradient/tensor_collectives.h"

namespace lockstep {
namespace {

// Each replica's weight in a mean: the examples that it has seen.
std::vector<double> weights_of(std::vector<double> seen) {
  const bool none = std::ranges::all_of(seen, [](double examples) { return examples == 0; });
  return none ? std::vector<double>(seen.size(), 1) : seen;
}

}  // namespace

std::vector<double> ReplicatedParameters::seen_by_all() const {
  std::vector<double> all(seen_.size() * static_cast<std::size_t>(topology_.tokens.size()));
  const auto first = seen_.size() * static_cast<std::size_t>(topology_.tokens.rank());
  std::copy(seen_.begin(), seen_.end(), all.begin() + static_cast<std::ptrdiff_t>(first));
  topology_.tokens.sum(all);
  return all;
}

std::vector<at::Tensor> ReplicatedParameters::average_buffers() const {
  if (topology_.tokens.size() == 1 || buffer_names_.empty()) return average_own_buffers();
  const at::NoGradGuard no_grad;
  const auto weights = weights_of(seen_by_all());
  const auto most = std::ranges::max_element(weights) - weights.begin();
  const int root = static_cast<int>(most) / replicas();
  const bool has_most = topology_.tokens.rank() == root;
  const std::span own(weights.data() + seen_.size() * static_cast<std::size_t>(topology_.tokens.rank()), seen_.size());
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<at::Tensor> averages, taken;
  for (std::size_t i = 0; i < buffer_names_.size(); ++i) {
    const auto& first = buffer(0, i);
    if (first.is_floating_point()) {
      const auto sum = sum_of_own_buffers(i, own);
      topology_.tokens.sum({sum.mutable_data_ptr<double>(), static_cast<std::size_t>(sum.numel())});
      averages.push_back((sum / all).to(first.options()));
    } else {
      averages.push_back(buffer(has_most ? static_cast<int>(most) % replicas() : 0, i).clone());
      taken.push_back(averages.back());
    }
  }
  if (!taken.empty()) broadcast(topology_.tokens, taken, root);
  return averages;
}

std::vector<at::Tensor> ReplicatedParameters::average_own_buffers() const {
  const at::NoGradGuard no_grad;
  const auto weights = weights_of(seen_);
  const auto most = static_cast<int>(std::ranges::max_element(weights) - weights.begin());
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<at::Tensor> averages;
  for (std::size_t i = 0; i < buffer_names_.size(); ++i) {
    const auto& first = buffer(0, i);
    averages.push_back(replicas() > 1 && first.is_floating_point()
                           ? (sum_of_own_buffers(i, weights) / all).to(first.options())
                           : buffer(most, i).to(first.device(), first.scalar_type(), /*non_blocking=*/false,
                                                /*copy=*/true));
  }
  return averages;
}

// The sum is of float64, in host memory. A replica with weight 0 does not count, whatever its values are.
at::Tensor ReplicatedParameters::sum_of_own_buffers(std::size_t index, std::span<const double> weights) const {
  auto sum = at::zeros(buffer(0, index).sizes(), at::kDouble);
  for (int replica = 0; replica < replicas(); ++replica) {
    const double weight = weights[static_cast<std::size_t>(replica)];
    if (weight > 0) sum += buffer(replica, index).to(at::kCPU).to(at::kDouble) * weight;
  }
  return sum;
}

void ReplicatedParameters::assign_buffer(std::size_t index, const at::Tensor& value) {
  for (int replica = 0; replica < replicas(); ++replica) assign_buffer_of(replica, index, value);
}

void ReplicatedParameters::assign_buffer_of(int replica, std::size_t index, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  const auto& own = buffer(replica, index);
  if (!own.is_same(value)) own.copy_(value);
}

// With central placement all replicas' parameters are replica 0's, and each has its own buffers.
void ReplicatedParameters::put_on(ops::ProgramDevices& devices) {
  std::vector<ops::ProgramDevices::Tensors> hosts;
  for (const auto& own : parameters_[0]) hosts.push_back({own});
  for (std::size_t i = 0; i < buffer_names_.size(); ++i) {
    auto& all = hosts.emplace_back();
    for (const auto& own : buffers_) all.push_back(own[i]);
  }
  variables_ = devices.variables(std::move(hosts));
}

void ReplicatedParameters::fetch(Deadline deadline) const {
  if (variables_) variables_->fetch(deadline);
}

ops::DeviceVariable& ReplicatedParameters::variable(std::size_t slot) const { return (*variables_)[slot]; }
ops::DeviceVariable& ReplicatedParameters::variable_of_buffer(std::size_t index) const {
  return (*variables_)[slots_.size() + index];
}

}  // namespace lockstep
