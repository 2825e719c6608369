// The losses that a forward pass adds to the loss of its batch.
#pragma once

#include "lockstep/train/add_loss.h"
#include "lockstep/train/loss.h"

namespace lockstep::train {

// While it lives, it takes the losses that this thread gives to add_loss. The innermost one takes them.
class [[nodiscard]] AddedLosses {
 public:
  enum class Use { with_gradients, values_alone, refused };
  explicit AddedLosses(Use use);
  ~AddedLosses();
  AddedLosses(const AddedLosses&) = delete;
  AddedLosses& operator=(const AddedLosses&) = delete;

  void add(const Tensor& scalar);

  // Returns Loss::Terms or MaskedTerms with them added to the mean. Throws InvalidArgument for a loss that is a sum.
  template <class Terms>
  Terms add_to(Terms loss, const Loss& compiled) const {
    if (!sum_.defined()) return loss;
    check_mean(compiled);
    loss.sum = loss.sum + sum_ * loss.divisor;
    return loss;
  }

 private:
  static void check_mean(const Loss& compiled);

  const Use use_;
  AddedLosses* const before_;
  Tensor sum_;
};

}  // namespace lockstep::train
