// The hierarchical copy of tf.distribute.HierarchicalCopyAllReduce: sums go pairwise up a binomial tree to replica 0,
// and the new values come down the same tree. In each round the distance between partners doubles:
//
//   round 1: 0 <- 1   2 <- 3   4 <- 5
//   round 2: 0 <- 2   4
//   round 3: 0 <- 4
#pragma once

#include "gradient/one_pass.h"

namespace lockstep::gradient {

class Tree final : public OnePass {
 public:
  explicit Tree(const ReplicatedParameters& parameters);

  void wait(const Group& replicas, Deadline deadline) override;
  std::vector<const at::Tensor*> sources(std::size_t slot) const override;
  std::span<const at::Tensor> written(at::ScalarType dtype) const override { return parameters_.flats(dtype).first(1); }
  void publish(const Group& replicas, Deadline deadline) override;

 private:
  std::vector<at::Tensor> float_, double_;      // [replica], flat: the sums below it in the tree
  std::vector<std::vector<at::Tensor>> parts_;  // [replica][slot], of these
};

}  // namespace lockstep::gradient
