#include "strategy/step_programs.h"

#include "base/text.h"
#include "lockstep/base/error.h"
#include "strategy/strategy_impl.h"

namespace lockstep {
namespace {

using Tensors = std::vector<Tensor>;

Tensors defined_of(const Tensors& tensors) {
  Tensors defined;
  for (const auto& tensor : tensors)
    if (tensor.defined()) defined.push_back(tensor);
  return defined;
}

// `tensors` in the places where `like` has defined ones.
Tensors in_places_of(const Tensors& like, const Tensors& tensors) {
  Tensors all;
  auto next = tensors.begin();
  for (const auto& tensor : like) all.push_back(tensor.defined() ? *next++ : Tensor());
  return all;
}

std::vector<std::int64_t> shapes_of(const Tensors& tensors) {
  std::vector<std::int64_t> shapes;
  for (const auto& tensor : tensors) {
    shapes.push_back(tensor.defined() ? static_cast<std::int64_t>(tensor.scalar_type()) : -1);
    if (!tensor.defined()) continue;
    shapes.push_back(tensor.dim());
    shapes.insert(shapes.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  return shapes;
}

void check_alike(const std::vector<Tensors>& inputs) {
  for (std::size_t replica = 1; replica < inputs.size(); ++replica) {
    for (std::size_t i = 0; i < inputs[replica].size(); ++i) {
      if (shapes_of({inputs[0][i]}) == shapes_of({inputs[replica][i]})) continue;
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

std::vector<std::vector<Tensor>> strategy::run_program(StrategyImpl& strategy, const internal::StepToRun& step) {
  check_alike(step.inputs);
  const auto& like = step.inputs[0];
  const auto compile = [&] {
    return strategy.programs()->compile(
        {.name = "a step", .inputs = defined_of(like), .function = [&](const Tensors& traced) {
           ReplicaContext replica(0, strategy);
           return step.function(replica, in_places_of(like, traced));
         }});
  };
  std::unique_ptr<ops::CompiledProgram> once;
  auto& program = step.programs == nullptr ? once : step.programs->compiled[{strategy.programs(), shapes_of(like)}];
  if (program == nullptr) program = compile();

  ops::CompiledProgram::Launch launch{.updates = {true}};
  const auto seeds = strategy.next_run_seeds();
  for (std::size_t replica = 0; replica < step.inputs.size(); ++replica) {
    launch.inputs.push_back(defined_of(step.inputs[replica]));
    launch.seeds.push_back({seeds[replica]});
  }
  auto results = program->launch(launch)->results(strategy.deadline());
  strategy.count_run();
  return results;
}

}  // namespace lockstep
