#include "train/recorded_step.h"

#include <ATen/ATen.h>

#include "base/log.h"
#include "base/text.h"
#include "ops/tensor_lists.h"

namespace lockstep::train {
namespace {

Tensor own_copy(const Tensor& tensor, c10::Device device) {
  return tensor.defined() ? tensor.detach().to(device, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true)
                          : tensor;
}

// Copies from any memory, also a host's that is not pinned: CUDA has read that when the call returns.
void overwrite(const Tensor& own, const Tensor& value) {
  const at::NoGradGuard no_grad;
  if (own.defined()) own.copy_(value, /*non_blocking=*/true);
}

}  // namespace

bool RecordedStep::serves(const Example& part, c10::Device device,
                          const std::function<ComputedStep(const Example&)>& compute) {
  if (failed_ || part.weight.defined()) return false;
  auto shape = ops::shapes_of({part.x, part.y});  // weights would make the loss's divisor a part of the recording
  if (shape != shape_) {
    // An epoch's last, smaller batch is computed without the recording, which is kept for the full batches.
    if (work_ != nullptr) return false;
    shape_ = std::move(shape);
    seen_ = 0;
  }
  if (work_ == nullptr && ++seen_ > kStepsBefore) record(part, device, compute);
  return work_ != nullptr;
}

void RecordedStep::record(const Example& part, c10::Device device,
                          const std::function<ComputedStep(const Example&)>& compute) {
  input_ = {own_copy(part.x, device), own_copy(part.y, device)};
  try {
    work_ = ops::work_recorder()(device, [&] { result_ = compute(input_); });
  } catch (const c10::Error& error) {
    give_up(error.what_without_backtrace());
  } catch (const std::exception& error) {
    give_up(error.what());
  }
}

void RecordedStep::give_up(const char* reason) {
  log_warning(text("jit_compile: the step cannot be recorded and runs as without it: ", reason));
  failed_ = true;
}

ComputedStep RecordedStep::play(const Example& part) {
  overwrite(input_.x, part.x);
  overwrite(input_.y, part.y);
  work_->replay();
  return result_;
}

}  // namespace lockstep::train
