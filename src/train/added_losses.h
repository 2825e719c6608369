// What a forward pass adds to the loss of its batch.
#pragma once

#include "lockstep/train/add_loss.h"
#include "lockstep/train/loss.h"

namespace lockstep::train {

// While it lives, it takes what add_loss is called with in this thread. The innermost holds.
class [[nodiscard]] AddedLosses {
 public:
  enum class Use { with_gradients, values_alone, refused };
  explicit AddedLosses(Use use);
  ~AddedLosses();
  AddedLosses(const AddedLosses&) = delete;
  AddedLosses& operator=(const AddedLosses&) = delete;

  void add(const Tensor& scalar);

  // Loss::Terms or MaskedTerms with them, which are added to the mean. Throws InvalidArgument for a loss that is a sum.
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
