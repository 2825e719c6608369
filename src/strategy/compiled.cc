#include "lockstep/strategy/compiled.h"

#include <torch/nn/module.h>

#include <algorithm>

#include "gradient/replicated_parameters.h"
#include "lockstep/base/error.h"
#include "strategy/step_programs.h"
#include "strategy/unwrap.h"

namespace lockstep {

std::shared_ptr<internal::StepPrograms> internal::make_step_programs() {
  return std::make_shared<internal::StepPrograms>();
}

void internal::refuse_argument_of_step() {
  throw InvalidArgument(
      "run: an argument with a value for each replica is not made of tensors; a compiled step takes "
      "PerReplica<Tensor>, "
      "PerReplica<Example>, and pairs and tuples of these");
}

void internal::refuse_result_of_step() {
  throw InvalidArgument(
      "run: the step returns a value that is not made of tensors; a compiled step returns nothing, a Tensor (a number "
      "as "
      "a scalar tensor, without item()), an Example, or pairs and tuples of these");
}

void internal::refuse_argument_of_compiled() {
  throw InvalidArgument(
      "run: a function that is compiled takes tensors, examples, modules and numbers as arguments; let it capture "
      "others");
}

void internal::add_module(const ReplicatedModule& module, StepKey& key) {
  const std::shared_ptr<const ReplicatedParameters> parameters = Unwrap::pointer(module);
  key.values.push_back(static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(parameters.get())));
  key.values.push_back(parameters->module(0).is_training() ? 1 : 0);
  key.alive.emplace_back(parameters);
}

internal::StepPrograms::Entry& internal::StepPrograms::of(const Key& key) {
  std::erase_if(entries_, [](const auto& entry) {
    const auto& alive = entry.second.alive;
    return std::any_of(alive.begin(), alive.end(), [](const auto& needed) { return needed.expired(); });
  });
  return entries_[key];
}

}  // namespace lockstep
