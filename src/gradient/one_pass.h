// Gradients stay where autograd left them: the replica that updates reads those of all replicas, and writes all copies.
#pragma once

#include "gradient/gradient_sync.h"
#include "gradient/replicated_parameters.h"

namespace lockstep::gradient {

// Flat memory for a gradient as memory_for offers it: in the parameter's shape; undefined on another device.
at::Tensor in_shape_of(const at::Tensor& parameter, const at::Tensor& flat);

// Reduce-scatter, update and all-gather in one pass over memory, for the replicas of one process.
class OnePass : public GradientSync {
 public:
  // `root`: the replica that updates everything; -1: each updates an equal share.
  explicit OnePass(const ReplicatedParameters& parameters, int root = -1);

  ShardMap shards() const override;
  bool takes(std::size_t slot) const override { return parameters_.slots()[slot].trainable; }
  void on_ready(int replica, std::size_t slot, const at::Tensor& gradient) override;
  bool is_ready(int replica, std::size_t slot) const override { return of(replica).gradients[slot].defined(); }
  void finish(int replica, double weight, bool check_finite) override;
  void wait(const Group& /*replicas*/, Deadline /*deadline*/) override {}
  Totals totals() const override;  // of this process
  std::vector<const at::Tensor*> sources(std::size_t slot) const override;
  std::span<const at::Tensor> written(at::ScalarType dtype) const override { return parameters_.flats(dtype); }
  void end_step(int replica) override { forget(replica); }
  void forget(int replica) override;

 protected:
  // A cache line apart: each replica writes its own.
  struct alignas(64) Contribution {
    std::vector<at::Tensor> gradients;  // [slot], undefined where there is none
    double weight = 0;
    bool finite = true;
  };
  const Contribution& of(int replica) const { return contributions_[static_cast<std::size_t>(replica)]; }

  const ReplicatedParameters& parameters_;

 private:
  const int root_;
  std::vector<Contribution> contributions_;  // [replica]; written by it before the barrier that lets others read
};

}  // namespace lockstep::gradient
