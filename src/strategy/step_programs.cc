#include "strategy/step_programs.h"

#include <torch/nn/module.h>

#include <algorithm>

#include "base/text.h"
#include "gradient/replicated_parameters.h"
#include "lockstep/base/error.h"
#include "ops/tensor_lists.h"
#include "strategy/strategy_impl.h"

namespace lockstep {
namespace {

using Tensors = std::vector<Tensor>;

// Puts `tensors` into the places where `like` has defined ones.
Tensors in_places_of(const Tensors& like, const Tensors& tensors) {
  Tensors all;
  auto next = tensors.begin();
  for (const auto& tensor : like) all.push_back(tensor.defined() ? *next++ : Tensor());
  return all;
}

void check_alike(const std::vector<Tensors>& inputs) {
  for (std::size_t replica = 1; replica < inputs.size(); ++replica) {
    for (std::size_t i = 0; i < inputs[replica].size(); ++i) {
      if (ops::shapes_of({inputs[0][i]}) == ops::shapes_of({inputs[replica][i]})) continue;
      const auto described = [](const Tensor& tensor) {
        return tensor.defined() ? text("shape ", tensor.sizes(), " and dtype ", tensor.scalar_type())
                                : text("no values");
      };
      throw InvalidArgument(
          text("run: a tensor has ", described(inputs[0][i]), " on replica 0 and ", described(inputs[replica][i]),
               " on replica ", replica,
               "; a compiled step is one program for all replicas: use batches whose size they divide, "
               "and batch(size, {.drop_remainder = true})"));
    }
  }
}

}  // namespace

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

std::vector<std::vector<Tensor>> strategy::run_program(StrategyImpl& strategy, const internal::StepToRun& step) {
  check_alike(step.inputs);
  const auto& like = step.inputs[0];
  internal::StepPrograms::Entry once;
  auto key = ops::shapes_of(like);
  key.insert(key.end(), step.key.values.begin(), step.key.values.end());
  auto& entry = step.programs == nullptr ? once : step.programs->of({strategy.programs(), key});
  if (entry.program == nullptr) {
    internal::StepPrograms::Entry made{.alive = step.key.alive};
    made.alive.emplace_back(strategy.settings().programs);
    made.program = strategy.programs()->compile(
        {.name = "a step", .inputs = ops::defined_of(like), .function = [&](const Tensors& traced) {
           ReplicaContext replica(0, strategy);
           const auto results = step.function(replica, in_places_of(like, traced));
           for (const auto& result : results) made.is_defined.push_back(result.defined());
           return ops::defined_of(results);
         }});
    entry = std::move(made);
  }
  strategy.check_same_program("a step", ops::defined_of(like), *entry.program);

  std::vector<Tensors> inputs;
  for (const auto& of_replica : step.inputs) inputs.push_back(ops::defined_of(of_replica));
  ops::CompiledProgram::Launch launch{.inputs = entry.program->copy(inputs), .updates = {true}};
  for (const auto seed : strategy.next_run_seeds()) launch.seeds.push_back({seed});
  std::vector<std::vector<Tensor>> results;
  for (const auto& defined : strategy.results(*entry.program->launch(std::move(launch)))) {
    auto& all = results.emplace_back();
    auto next = defined.begin();
    for (const bool is_defined : entry.is_defined) all.push_back(is_defined ? *next++ : Tensor());
  }
  return results;
}

}  // namespace lockstep
