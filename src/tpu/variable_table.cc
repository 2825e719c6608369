#include "tpu/variable_table.h"

namespace lockstep::tpu {
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
