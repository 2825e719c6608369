// Parameters and buffers as variables of devices that run compiled programs.
#include "gradient/replicated_parameters.h"

namespace lockstep {

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
