// Sharded optimizer state (bucketed.h) where processes share memory: as in Direct, each replica reads the gradients of
// all processes' replicas in its shards, and writes new values to all processes.
//
//   gradients of process 0 | a0 a1 |                                            | v0 v1 |  values of process 0
//                                     -- process i adds ai and bi, writes vi -->
//   gradients of process 1 | b0 b1 |                                            | v0 v1 |  values of process 1
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "gradient/direct.h"

namespace lockstep::gradient {

class Mapped final : public Reduction {
 public:
  // Returns null on all processes where these do not share memory. Collective. Throws InvalidArgument on all processes
  // where models, or the numbers of replicas, differ. Puts the first copy of the values into memory of the Group.
  static std::unique_ptr<Mapped> make(ReplicatedParameters& parameters, const Communicator& ranks);

  at::Tensor memory_for(int replica, std::size_t slot) const override;
  void add(int replica, std::size_t slot, const at::Tensor& gradient) override;
  Sums finish(const Group& replicas, double weight, bool check_finite, Deadline deadline) override;
  void publish(const Group& replicas, Deadline deadline) override;
  void end_step(int replica, StepEnd end) override { own_.end_step(replica, end); }

 private:
  // `memories[r]`: rank r's, for the gradients of its replicas.
  Mapped(const ReplicatedParameters& parameters, Communicator ranks, const std::vector<Memory>& memories);
  void exchange_flags(const Sums& own);
  std::int64_t trainable_end(at::ScalarType dtype) const;  // in the flat buffers
  const at::Tensor& own_gradient(int replica, std::size_t slot) const;

  // Constant after construction.
  const ReplicatedParameters& parameters_;
  const Communicator ranks_;
  std::vector<std::vector<at::Tensor>> gradients_;  // [replica of all ranks, numbered through][slot]: flat

  Direct own_;                                      // of this process's replicas
  std::vector<std::vector<at::Tensor>> added_;      // the tensors of gradients_ that this step has
  std::vector<std::span<const at::Tensor>> parts_;  // views of them, as Sums::parts
  Sums sums_;                                       // written by replica 0
};

}  // namespace lockstep::gradient
