#include "tpu/programs/programs.h"

#include <chrono>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "ops/tensors.h"
#include "strategy/step_programs.h"
#include "tpu/programs/compiled_model.h"

namespace lockstep::programs {
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

// How long a worker that fails between a launch and its results waits for the launch to end.
constexpr std::chrono::seconds kToEndLaunch(10);

// Waits for a program, so that its variables are kept: all workers have launched it, so it ends in spite of a failure.
void await(ops::LaunchedProgram& launched) {
  try {
    launched.results(Deadline::after(kToEndLaunch), {});
  } catch (const std::exception&) {
  }
}

}  // namespace

void Programs::begin(StrategyImpl& strategy) {
  const auto& group = strategy.workers().group_options();
  watch_.emplace(strategy.topology().all.with_group(strategy.workers().membership()->group(group)),
                 [devices = devices_](const std::string& reason) { devices->fail_waiters(reason); });
}

void Programs::tell_failure(const std::exception& error) const {
  if (watch_) watch_->abort(error.what());
}

std::shared_ptr<ReplicatedParameters> Programs::replicate(
    StrategyImpl& strategy, const std::vector<std::shared_ptr<torch::nn::Module>>& modules) const {
  auto parameters = Kind::replicate(strategy, modules);
  parameters->put_on(*devices_);
  return parameters;
}

std::shared_ptr<GradientPath> Programs::make_gradient_path(const StrategyImpl& strategy, const Optimizer& optimizer,
                                                           std::shared_ptr<ReplicatedParameters> parameters,
                                                           gradient::GradientPathOptions options) const {
  options.devices = devices_;
  return Kind::make_gradient_path(strategy, optimizer, std::move(parameters), std::move(options));
}

std::vector<std::vector<at::Tensor>> Programs::run_compiled(StrategyImpl& strategy,
                                                            const internal::StepToRun& step) const {
  check_alike(step.inputs);
  const auto& like = step.inputs[0];
  internal::StepPrograms::Entry once;
  auto key = ops::shapes_of(like);
  key.insert(key.end(), step.key.values.begin(), step.key.values.end());
  auto& entry = step.programs == nullptr ? once : step.programs->of({devices_.get(), key});
  if (entry.program == nullptr) {
    internal::StepPrograms::Entry made{.alive = step.key.alive};
    made.alive.emplace_back(devices_);
    made.program =
        devices_->compile({.name = "a step", .inputs = ops::defined_of(like), .function = [&](const Tensors& traced) {
                             ReplicaContext replica(0, strategy);
                             const auto results = step.function(replica, in_places_of(like, traced));
                             for (const auto& result : results) made.is_defined.push_back(result.defined());
                             return ops::defined_of(results);
                           }});
    entry = std::move(made);
  }
  check_same_program(strategy.topology().all, "a step", ops::defined_of(like), *entry.program);

  std::vector<Tensors> inputs;
  for (const auto& of_replica : step.inputs) inputs.push_back(ops::defined_of(of_replica));
  ops::CompiledProgram::Launch launch{.inputs = entry.program->copy(inputs), .updates = {true}};
  const auto run_seed = strategy.seeds().next();
  for (int replica = 0; replica < strategy.replicas().count(); ++replica)
    launch.seeds.push_back({mix(run_seed, static_cast<std::uint64_t>(strategy.topology().first_replica() + replica))});
  std::vector<std::vector<Tensor>> all_results;
  for (const auto& defined : results(strategy, *entry.program->launch(std::move(launch)))) {
    auto& all = all_results.emplace_back();
    auto next = defined.begin();
    for (const bool is_defined : entry.is_defined) all.push_back(is_defined ? *next++ : Tensor());
  }
  return all_results;
}

std::shared_ptr<train::Execution> Programs::execution(ModelImpl& model) const {
  return std::make_shared<CompiledModel>(model, *this);
}

std::vector<std::vector<at::Tensor>> Programs::results(StrategyImpl& strategy, ops::LaunchedProgram& launched,
                                                       const std::function<void()>& meanwhile) const {
  const auto& workers = strategy.topology().all;
  try {
    if (meanwhile) meanwhile();
  } catch (const PeerLost&) {  // its devices do not compute the program any more
    throw;
  } catch (const Aborted&) {  // another worker has failed, and told this one
    await(launched);
    throw;
  } catch (const std::exception& error) {
    if (workers.size() > 1) {
      strategy.workers().tell_failure(error);
      workers.abort(error.what());
    }
    await(launched);
    throw;
  }
  try {
    auto results =
        launched.results(strategy.deadline(), watch_ ? [this] { watch_->check(); } : std::function<void()>());
    strategy.replicas().count_step();
    return results;
  } catch (const Aborted&) {
    await(launched);
    throw;
  }
}

void Programs::check_same_program(const Communicator& workers, const std::string& name,
                                  const std::vector<at::Tensor>& inputs, const ops::CompiledProgram& program) {
  if (workers.size() == 1) return;
  std::string shapes;
  for (const auto& input : inputs) shapes += text(" ", input.scalar_type(), " ", input.sizes());
  workers.check_all_agree(text("programs of ", name),
                          text("inputs", shapes, "\na program with the hash ", program.hash()));
}

ops::ProgramDevices& devices_of(const StrategyImpl& strategy) {
  return *dynamic_cast<const Programs&>(strategy.kind()).devices();
}

}  // namespace lockstep::programs
