// How much each rank's gradients count in a pass, and the scale of what is sent.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/collective/communicator.h"

namespace lockstep::gradient {

// The weights of the ranks' gradients in a pass, which are gathered beside the gradients.
//
// In each pass all ranks call `announce` and then `wait` at the same points of their sequence of calls; then
// `end_pass`. One thread at a time.
class PassWeights {
 public:
  // `of`: whose weights they are, for messages where ranks' calls differ.
  void name(const std::string& of) { purpose_ = Purpose("the weights of " + of); }

  // Sets this rank's weight, and whether it has gradients at all. They are sent to the others now (`in_background`), or
  // in `wait`.
  void announce(const Communicator& ranks, double weight, bool has_gradients, bool in_background);

  // Returns when the weights of all ranks are there. More calls in a pass do nothing. Throws what the Group throws.
  void wait(const Communicator& ranks);
  void end_pass();

  // The exchange of a pass that failed, if any: it has ended, or will end with an error.
  std::optional<Work>& pending() { return work_; }

  // Sums over all ranks, after `wait`; the same bits on all.
  double total() const { return total_; }
  double ranks_with_weight() const { return ranks_with_weight_; }
  bool any_has_gradients() const { return having_ > 0; }
  int lowest_with_gradients() const;

  // The running weight scale: gradients are divided by it before they are sent, so that sums of many examples fit in 16
  // bits. While weights stay the same no division is needed afterwards. The scale is the largest mean weight, in a pass
  // so far, of the ranks that had gradients; 0 before the first pass's `wait`.
  double scale() const { return scale_; }
  void restore(double scale) { scale_ = scale; }

 private:
  struct Weight {
    double weight = 0, has_gradients = 0;
  };

  Call exchange(const Communicator& ranks);
  void update_scale();

  Purpose purpose_;
  Weight mine_;
  std::vector<Weight> all_;  // [rank]
  std::optional<Work> work_;
  bool known_ = false;  // whether all_ is of this pass
  double total_ = 0, having_ = 0, ranks_with_weight_ = 0;
  double scale_ = 0;
};

}  // namespace lockstep::gradient
