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

  // A loss with them, which are added to its mean. Throws InvalidArgument for a loss that is a sum.
  Loss::Terms add_to(Loss::Terms loss, const Loss& compiled) const;

 private:
  const Use use_;
  AddedLosses* const before_;
  Tensor sum_;
};

}  // namespace lockstep::train
