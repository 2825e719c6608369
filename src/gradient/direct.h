// Sums between the replicas of one process. Gradients stay where autograd left them: the replica that updates reads
// those of all replicas.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "gradient/reduction.h"
#include "gradient/replicated_parameters.h"

namespace lockstep::gradient {

// How the replicas of one process exchange gradients and values.
enum class Exchange {
  one_pass,                 // replica i of N sums slice i of all gradients, updates it, and writes it to all copies
  reduction_to_one_device,  // one replica does this for all slices
  hierarchical_copy,        // sums pairwise up a tree, updates at its root, copies down the same tree
};

class Direct final : public Reduction {
 public:
  // `root`: the replica that updates everything (reduction_to_one_device).
  explicit Direct(const ReplicatedParameters& parameters, Exchange exchange = Exchange::one_pass, int root = 0);

  at::Device device(int replica) const override {
    const bool stays = parameters_.placement() == Placement::device && !parameters_.slots().empty();
    return stays ? parameters_.parameter(replica, 0).device() : at::Device(at::kCPU);
  }
  void add(int replica, std::size_t slot, const at::Tensor& gradient) override {
    contributions_[static_cast<std::size_t>(replica)].gradients[slot] = gradient;
  }
  Sums finish(const Group& replicas, double weight, bool check_finite, Deadline deadline) override;
  void publish(const Group& replicas, Deadline deadline) override;
  void end_step(int replica, StepEnd end) override;

 private:
  // A cache line apart: each replica writes its own.
  struct alignas(64) Contribution {
    std::vector<at::Tensor> gradients;  // [slot], undefined where there is none
    double weight = 0;
    bool finite = true;
  };

  // The hierarchical copy of tf.distribute.HierarchicalCopyAllReduce: sums go pairwise up a binomial tree to replica 0,
  // and the new values come down the same tree. In each round the distance between partners doubles:
  //
  //   round 1: 0 <- 1   2 <- 3   4 <- 5
  //   round 2: 0 <- 2   4
  //   round 3: 0 <- 4
  struct Tree {
    explicit Tree(const ReplicatedParameters& parameters);

    std::vector<at::Tensor> floats, doubles;      // [replica], flat: the sums below it in the tree
    std::vector<std::vector<at::Tensor>> places;  // [replica][slot], of these
    std::vector<at::Tensor> sums;                 // [slot]: replica 0's places that have a gradient
  };
  void sum_up(const Group& replicas, Deadline deadline);

  const ReplicatedParameters& parameters_;
  std::vector<Contribution> contributions_;  // [replica]; written by it before the barrier that lets others read
  std::optional<Tree> tree_;
  std::vector<std::span<const at::Tensor>> parts_;  // as Sums::parts
};

// Flat memory for a gradient as memory_for offers it: in the parameter's shape; undefined on another device.
at::Tensor in_shape_of(const at::Tensor& parameter, const at::Tensor& flat);

// Flat memory with the gradient in it: copies it there, unless backward has written it there. An undefined gradient
// stays undefined.
at::Tensor placed_in(const at::Tensor& flat, const at::Tensor& gradient);

}  // namespace lockstep::gradient
