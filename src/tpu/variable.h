// Tensors that stay on the devices from program to program.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "ops/traced_program.h"
#include "tpu/pjrt/client.h"

namespace lockstep::tpu {

// The devices of a strategy, as its programs use them.
struct Replicas {
  std::shared_ptr<const pjrt::Client> client;
  std::vector<int> of_all_processes;  // [replica]: the devices' ids
  std::vector<pjrt::Device> devices;  // [replica of this process]
  std::shared_ptr<int> launches;      // with several processes: how many programs were launched on these devices

  pjrt::Buffer copy(const at::Tensor& host, std::size_t replica) const;
};

// One thread at a time.
class Variable final : public ops::DeviceVariable, public std::enable_shared_from_this<Variable> {
 public:
  using Values = std::vector<pjrt::Buffer>;  // [replica]

  Variable(Replicas replicas, std::vector<at::Tensor> host);

  const std::vector<at::Tensor>& host() const { return host_; }

  // The values of all replicas, after copying those that were written into the host's tensors. Throws DeviceError where
  // values are lost. To free values waits for the end of a run that uses or makes them.
  std::shared_ptr<const Values> values();

  // A program's run takes the values, which are lost, and gives others, which it returns.
  void lose();
  std::shared_ptr<const Values> give(Values values);

  // Fetches all together, since a write to one of the host's tensors counts as a write to all views of its memory.
  static void fetch(const std::vector<std::shared_ptr<Variable>>& variables, Deadline deadline);

 private:
  enum class State { host_only, same, newer_on_devices, lost };
  bool host_changed() const;
  void require_values() const;
  std::vector<at::Tensor> read(Deadline deadline) const;
  void remember_host();

  const Replicas replicas_;
  const std::vector<at::Tensor> host_;  // one, or one for each replica
  std::vector<std::int64_t> versions_;  // of host_, when the devices' values were equal to them
  std::shared_ptr<const Values> values_;
  State state_ = State::host_only;
};

// A strategy's variables, by the tensors of the host that they belong to. One thread at a time.
class VariableTable {
 public:
  std::unique_ptr<ops::DeviceVariables> add(const Replicas& replicas, std::vector<std::vector<at::Tensor>> hosts);

  // The variable that belongs to a tensor of the host; null: none does.
  std::shared_ptr<Variable> find(const at::Tensor& host) const;

 private:
  std::unordered_map<const c10::TensorImpl*, std::weak_ptr<Variable>> variables_;
};

}  // namespace lockstep::tpu
