// A strategy's variables, by the tensors of the host that they belong to.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "tpu/variable.h"

namespace lockstep::tpu {

// One thread at a time.
class VariableTable {
 public:
  std::unique_ptr<ops::DeviceVariables> add(const Replicas& replicas, std::vector<std::vector<at::Tensor>> hosts);

  // The variable that belongs to a tensor of the host; null: none does.
  std::shared_ptr<Variable> find(const at::Tensor& host) const;

 private:
  std::unordered_map<const c10::TensorImpl*, std::weak_ptr<Variable>> variables_;
};

}  // namespace lockstep::tpu
