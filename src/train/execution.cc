#include "train/execution.h"

#include "base/text.h"
#include "lockstep/base/error.h"
#include "train/model_impl.h"
#include "train/threaded_execution.h"

namespace lockstep::train {

std::shared_ptr<Execution> Execution::of(ModelImpl& impl) {
  if (auto execution = unwrap(impl.strategy).kind().execution(impl)) return execution;
  return std::make_shared<ThreadedExecution>(impl);
}

std::shared_ptr<ReplicatedParameters> Execution::make_parameters(const Example& sample) {
  return strategy::replicate_modules(unwrap(impl_.strategy), impl_.state.first_seed,
                                     [&] { return impl_.definition.make(sample); });
}

std::string batch_named(const Example& part) {
  return text("a batch of shape ", part.x.sizes(), " and dtype ", part.x.scalar_type());
}

void Execution::fetch_for_forward() const { impl_.lead->fetch(); }

void Execution::require_gradient(const Tensor& loss) {
  if (loss.requires_grad()) return;
  throw InvalidArgument(
      "the loss depends on no trainable parameter; are all frozen, or does forward detach its result?");
}

Tensor Execution::forward(int replica, const Tensor& x) const {
  return impl_.definition.forward(impl_.parameters->module(replica), x);
}

Tensor Execution::outputs_of(int replica, const Example& part) const {
  // Some layers would take one example for a batch. A module of the user's own may accept both.
  if (!impl_.definition.layers.empty() && part.x.dim() + 1 == static_cast<std::int64_t>(impl_.built_for.size())) {
    throw InvalidArgument(
        text("the model cannot take ", batch_named(part), ": it was built for batches of shape [batch, ",
             join(at::IntArrayRef(impl_.built_for).slice(1)), "]; call batch() on the data set first"));
  }
  const auto& split = impl_.parameters->split();
  try {
    const ComputePolicy::Scope scope(impl_.policy, part.x.device().type());
    if (split && split->before_forward) split->before_forward();
    return impl_.policy.outputs(forward(replica, part.x));
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    const bool one_value = what.find("Expected more than 1 value per channel") != std::string::npos;
    throw InvalidArgument(
        text("the model cannot take ", batch_named(part), ": ", what,
             impl_.parameters->is_split() ? ". Where a plan divides layers, an output that stays divided "
                                            "must go to a RowwiseParallel layer, or be whole: "
                                            "ColwiseParallel{.output = Replicate()}"
                                          : "",
             one_value ? ". Batch normalization needs two examples on each replica: the last batch of "
                         "the data set leaves one; use batch(size, {.drop_remainder = true}), another "
                         "batch size, or lockstep::BatchNormalization"
                       : ""));
  }
}

}  // namespace lockstep::train
