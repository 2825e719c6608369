#include "train/added_losses.h"

#include <ATen/ATen.h>

#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

thread_local train::AddedLosses* losses_of_thread = nullptr;

}  // namespace

void add_loss(const Tensor& scalar) {
  if (!scalar.defined() || scalar.numel() != 1) {
    throw InvalidArgument(text("add_loss: the loss ",
                               scalar.defined() ? text("has shape ", scalar.sizes()) : "is undefined",
                               "; it must be a scalar"));
  }
  if (losses_of_thread != nullptr) losses_of_thread->add(scalar);
}

train::AddedLosses::AddedLosses(Use use) : use_(use), before_(std::exchange(losses_of_thread, this)) {}
train::AddedLosses::~AddedLosses() { losses_of_thread = before_; }

void train::AddedLosses::add(const Tensor& scalar) {
  if (use_ == Use::refused)
    throw InvalidArgument("add_loss: a model that is cut into stages has no loss but that of its last stage");
  if (use_ == Use::with_gradients && !at::GradMode::is_enabled())
    throw InvalidArgument("add_loss: in a layer that is recomputed it would have no gradient");
  const auto one = scalar.reshape({});
  sum_ = sum_.defined() ? sum_ + one : one;
}

void train::AddedLosses::check_mean(const Loss& compiled) {
  if (compiled.reduction() == Reduction::sum)
    throw InvalidArgument("add_loss: the model is compiled with a loss of Reduction::sum; take a mean");
}

}  // namespace lockstep
