// Means over ranks that are sent in 8 bits: a quarter of float32's bytes.
//
//   values + residual  ->  8 bits  -- all_to_all -->  mean in float32, at the owner  ->  8 bits  -- all_gather -->
//
// A block of 256 elements shares a scale, its largest magnitude / 127. What rounding has lost is added to the next
// values (error feedback), at the senders and at the owner. So means are right in the long run.
//
// Error feedback: Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed
// training of speech DNNs", Interspeech 2014. Blocks: Dettmers et al., "8-bit optimizers via block-wise quantization",
// ICLR 2022.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "lockstep/collective/group.h"

namespace lockstep::gradient {

// One vector's exchange. One thread at a time.
class EightBitMean {
 public:
  // For flat float32 vectors on `device`, of which rank r owns counts[r] consecutive elements; or for vectors of
  // `numel` elements, which `ranks` own evenly.
  EightBitMean(int rank, const Counts& counts, at::Device device);
  EightBitMean(int rank, std::int64_t numel, int ranks, at::Device device);

  // values <- their mean over the ranks, with the same bits on all; without `gathers` this rank gets its own range
  // alone. `idle`: elements that no rank uses, which are to be zero, and whose residuals stay for later; equal on all
  // ranks. Collective, by `run`. Values that are not finite give means that are not, and leave no residual.
  struct Elements {
    std::int64_t begin, numel;
  };
  void reduce(const at::Tensor& values, bool gathers, const Group::RunCalls& run,
              const std::vector<Elements>& idle = {}) const;

  // The losses by rounding so far, which the next `reduce` adds. Tensors that belong to this object, to be saved.
  const std::vector<at::Tensor>& residuals() const { return residuals_; }

 private:
  // A range of elements that one rank owns. Messages have whole blocks.
  struct Range {
    std::int64_t begin = 0, numel = 0;  // elements
    std::int64_t blocks = 0;
    std::int64_t place = 0, bytes = 0;  // in a message about all ranges
  };

  void exchange(const at::Tensor& values, bool gathers, const Group::RunCalls& run) const;

  // Calls act(residual) for the residuals of the elements, of values and then of means, always in one order.
  void for_residuals(const std::vector<Elements>& elements, const std::function<void(at::Tensor)>& act) const;

  std::vector<Range> ranges_;              // [rank]
  Range own_;                              // this rank's
  at::Tensor sent_, received_, gathered_;  // messages: about all ranges, about own_ from each rank, about all ranges
  std::vector<at::Tensor> residuals_;      // [rank]: of this rank's values; then of the means of its own range
};

}  // namespace lockstep::gradient
