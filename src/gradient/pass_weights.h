// How much each rank's gradients count in a pass, which ranks tell each other beside the gradients.
#pragma once

#include <optional>
#include <vector>

#include "lockstep/collective/communicator.h"

namespace lockstep::gradient {

// In each pass: announce, then wait, on all ranks at the same places among their calls; then end_pass. One thread at a
// time.
class PassWeights {
 public:
  // This rank's weight, and whether it has gradients at all. Tells it to the others now, or in `wait`.
  void announce(const Communicator& ranks, double weight, bool has_gradients, bool in_background);

  // Until all ranks' are there; once is enough. Throws what the Group throws.
  void wait(const Communicator& ranks);
  void end_pass();

  // Of a pass that broke off: what was announced has ended, or ends with an error.
  std::optional<Work>& pending() { return work_; }

  // Of all ranks, after `wait`; the same bits on all.
  double total() const { return total_; }
  double ranks_with_weight() const { return ranks_with_weight_; }
  bool any_has_gradients() const { return having_ > 0; }
  int lowest_with_gradients() const;

  // The running weight scale: what gradients are divided by before they are sent, so that sums of many examples have
  // room in 16 bits, and where weights stay as they are no division is left for afterwards. The largest of the passes'
  // mean weights of a rank that had gradients; 0 before the first pass's `wait`.
  double scale() const { return scale_; }
  void restore(double scale) { scale_ = scale; }

 private:
  struct Weight {
    double weight = 0, has_gradients = 0;
  };

  Call exchange(const Communicator& ranks);
  void update_scale();

  Weight mine_;
  std::vector<Weight> all_;  // [rank]
  std::optional<Work> work_;
  bool known_ = false;  // all ranks', of this pass
  double total_ = 0, having_ = 0, ranks_with_weight_ = 0;
  double scale_ = 0;
};

}  // namespace lockstep::gradient
