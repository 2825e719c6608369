#include "tpu/variable.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "lockstep/base/device_error.h"
#include "ops/tensors.h"

namespace lockstep::tpu {

pjrt::Buffer Replicas::copy(const at::Tensor& host, std::size_t replica) const {
  const auto values = host.contiguous();
  return client->copy_to_device(values.const_data_ptr(), {ops::dtype_of(values.scalar_type()), values.sizes().vec()},
                                devices[replica]);
}

Variable::Variable(Replicas replicas, std::vector<at::Tensor> host)
    : replicas_(std::move(replicas)), host_(std::move(host)) {}

std::shared_ptr<const Variable::Values> Variable::values() {
  if (state_ != State::host_only && !host_changed()) {
    require_values();
    return values_;
  }
  Values copied;
  for (std::size_t i = 0; i < replicas_.devices.size(); ++i)
    copied.push_back(replicas_.copy(host_[host_.size() == 1 ? 0 : i].detach(), i));
  values_ = std::make_shared<Values>(std::move(copied));
  remember_host();
  return values_;
}

void Variable::require_values() const {
  if (state_ == State::lost)
    throw DeviceError("a program that failed has taken variables with it; load a checkpoint to go on");
}

void Variable::lose() {
  state_ = State::lost;
  values_.reset();
}

std::shared_ptr<const Variable::Values> Variable::give(Values values) {
  values_ = std::make_shared<Values>(std::move(values));
  state_ = State::newer_on_devices;
  return values_;
}

// The host's values count where they were written to in the meantime. All are read before the first is written.
void Variable::fetch(const std::vector<std::shared_ptr<Variable>>& variables, Deadline deadline) {
  std::vector<Variable*> equal;
  for (const auto& variable : variables)
    if (variable->state_ != State::host_only && !variable->host_changed()) equal.push_back(variable.get());
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
  for (auto* const variable : equal) {
    if (variable->state_ == State::same) continue;
    auto values = variable->read(deadline);
    for (std::size_t i = 0; i < values.size(); ++i) copies.emplace_back(variable->host_[i].detach(), values[i]);
  }
  const at::NoGradGuard no_grad;
  for (const auto& [to, from] : copies) to.copy_(from);
  for (auto* const variable : equal) variable->remember_host();
}

// The devices' values of host_.
std::vector<at::Tensor> Variable::read(Deadline deadline) const {
  require_values();
  std::vector<at::Tensor> read;
  for (std::size_t i = 0; i < host_.size(); ++i) {
    read.push_back(at::empty(host_[i].sizes(), host_[i].options().requires_grad(false)));
    (*values_)[i].copy_to_host(read.back().mutable_data_ptr(), read.back().nbytes(), deadline);
  }
  return read;
}

bool Variable::host_changed() const {
  for (std::size_t i = 0; i < versions_.size(); ++i)
    if (host_[i]._version() != versions_[i]) return true;
  return false;
}

void Variable::remember_host() {
  versions_.clear();
  for (const auto& tensor : host_) versions_.push_back(tensor._version());
  state_ = State::same;
}

namespace {

struct VariableList final : ops::DeviceVariables {
  ops::DeviceVariable& operator[](std::size_t i) override { return *all.at(i); }
  void fetch(Deadline deadline) override { Variable::fetch(all, deadline); }

  std::vector<std::shared_ptr<Variable>> all;
};

}  // namespace

std::unique_ptr<ops::DeviceVariables> VariableTable::add(const Replicas& replicas,
                                                         std::vector<std::vector<at::Tensor>> hosts) {
  std::erase_if(variables_, [](const auto& entry) { return entry.second.expired(); });
  auto list = std::make_unique<VariableList>();
  for (auto& host : hosts) {
    const auto& made = list->all.emplace_back(std::make_shared<Variable>(replicas, std::move(host)));
    for (const auto& tensor : made->host()) variables_[tensor.unsafeGetTensorImpl()] = made;
  }
  return list;
}

std::shared_ptr<Variable> VariableTable::find(const at::Tensor& host) const {
  const auto found = variables_.find(host.unsafeGetTensorImpl());
  return found == variables_.end() ? nullptr : found->second.lock();
}

}  // namespace lockstep::tpu
