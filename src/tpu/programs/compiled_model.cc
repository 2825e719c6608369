#include "tpu/programs/compiled_model.h"

#include <ATen/ATen.h>

#include <cmath>
#include <iomanip>
#include <limits>

#include "base/hash.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "strategy/strategy_impl.h"
#include "train/added_losses.h"
#include "train/model_impl.h"
#include "train/shapes.h"
#include "train/tracker.h"

namespace lockstep::programs {
namespace {

using Tensors = ops::ProgramDevices::Tensors;
using train::AddedLosses;
using train::Lap;
using train::StepResult;
using train::Tracker;

// Returns `values`, filled up to `rows` rows with a real example's `row`: results with it are as finite as with others.
Tensor filled_up(const Tensor& values, std::int64_t rows, const Tensor& row) {
  const auto missing = rows - values.size(0);
  if (missing == 0) return values;
  auto sizes = values.sizes().vec();
  sizes[0] = missing;
  return at::cat({values, row.expand(sizes)});
}

// Returns 1 for the first `count` of `rows` examples, and 0 for the others.
Tensor counts_of(std::int64_t count, std::int64_t rows) {
  auto counts = at::zeros({rows}, at::kFloat);
  counts.narrow(0, 0, count).fill_(1);
  return counts;
}

// Returns a replica's part that has examples, where there is one.
const Example& some_of(const std::vector<std::vector<Example>>& inputs) {
  for (const auto& input : inputs)
    for (const auto& part : input)
      if (part.size() > 0) return part;
  return inputs[0][0];
}

std::vector<Tensor> filled_up(const Example& part, std::int64_t rows, const Example& by) {
  const auto values = defined_of(part), row = defined_of(by);
  std::vector<Tensor> filled;
  for (std::size_t i = 0; i < values.size(); ++i) filled.push_back(filled_up(values[i], rows, row[i]));
  return filled;
}

}  // namespace

std::shared_ptr<ReplicatedParameters> CompiledModel::make_parameters(const Example& sample) {
  auto made = Execution::make_parameters(sample);
  number_ = owner_.next_model();
  return made;
}

// Returns the steps of a launch: a program of one step, as train_on_batch makes, is a program of its own.
int CompiledModel::steps(Kind kind, const std::vector<Input>& inputs) const {
  return kind == Kind::train && inputs[0].size() > 1 ? static_cast<int>(impl_.compiled->steps_per_execution) : 1;
}

bool CompiledModel::has_metrics() const {
  return !impl_.compiled->metrics.empty() || !impl_.compiled->weighted_metrics.empty();
}

// Reads the parts, each replica's in that replica's thread.
std::vector<CompiledModel::Input> CompiledModel::read(std::vector<Parts>& batches) const {
  std::vector<Input> inputs(static_cast<std::size_t>(impl_.strategy.num_local_replicas()));
  unwrap(impl_.strategy).replicas().run([&](int replica) {
    for (auto& batch : batches) inputs[static_cast<std::size_t>(replica)].push_back(batch[replica].read());
  });
  const auto none = internal::rows_of(some_of(inputs), 0, 0);
  for (auto& input : inputs)
    for (auto& part : input)
      if (part.size() == 0) part = none;
  return inputs;
}

std::string CompiledModel::name_of(Kind kind) {
  const char* const names[] = {"the training step", "the evaluation step", "the prediction step"};
  return names[static_cast<int>(kind)];
}

// Returns the launch's name, with what decides its program, the model's variables and how these change.
std::string CompiledModel::described(Kind kind, const std::vector<Input>& inputs) const {
  const auto found = programs_.find({kind, steps(kind, inputs), shapes_of(inputs[0][0])});
  std::string program = "not compiled yet";
  if (found != programs_.end() && found->second != nullptr) program = text("program ", found->second->program->hash());
  if (kind == Kind::train) {
    const double rate = impl_.gradients->updater().learning_rate();
    program += text(", learning rate ", std::setprecision(std::numeric_limits<double>::max_digits10), rate);
  }
  return text(name_of(kind), " of model ", number_, " (", program, ")");
}

std::shared_ptr<const CompiledModel::Compiled> CompiledModel::program_for(Kind kind, const std::vector<Input>& inputs,
                                                                          const LaunchAgreement& all) {
  const auto& like = inputs[0][0];
  const int count = steps(kind, inputs);
  auto& compiled = programs_[{kind, count, shapes_of(like)}];
  if (compiled != nullptr && compiled->rows >= all.rows) return compiled;
  auto tensors = filled_up(internal::rows_of(like, 0, 0), all.rows, all.row);
  tensors.push_back(counts_of(all.rows, all.rows));
  auto made = std::make_shared<Compiled>();
  made->rows = all.rows;
  const std::string name = name_of(kind);
  made->program = owner_.devices()->compile(
      {.name = name, .inputs = tensors, .steps = count, .function = [&](const Tensors& traced) {
         auto next = traced.begin();
         Example part{*next++};
         if (like.y.defined()) part.y = *next++;
         if (like.weight.defined()) part.weight = *next++;
         return trace(kind, part, *next, *made);
       }});
  Programs::check_same_program(impl_.topology.all, name, tensors, *made->program);
  compiled = std::move(made);
  return compiled;
}

Tensors CompiledModel::trace(Kind kind, const Example& part, const Tensor& counts, Compiled& compiled) const {
  auto& trace = *ops::current_trace();
  trace.set_counts(counts);
  const at::AutoGradMode with_gradients(kind == Kind::train);
  const AddedLosses added(kind == Kind::train ? AddedLosses::Use::with_gradients : AddedLosses::Use::values_alone);
  const auto outputs = outputs_of(0, part);
  compiled.output_sizes = outputs.sizes().vec();
  if (kind == Kind::predict) return {outputs};
  const auto& loss_function = impl_.compiled->loss;
  const auto loss = added.add_to(loss_function.masked_terms(part.y, outputs, part.weight, counts), loss_function);
  if (kind == Kind::train) {
    require_gradient(loss.sum);
    loss.sum.backward();
    const bool is_sum = loss_function.reduction() == Reduction::sum;  // which is not divided by anything
    impl_.gradients->apply_traced(trace, is_sum ? counts.sum() : loss.divisor, /*divides=*/!is_sum);
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < impl_.parameters->buffer_names().size(); ++i)
      trace.keep_without_examples(impl_.parameters->variable_of_buffer(i));
  }
  Tensors results{at::stack({loss.sum.detach().to(at::kFloat), loss.divisor.detach().to(at::kFloat)})};
  if (has_metrics()) results.push_back(outputs.detach());
  return results;
}

// Decides as the program does: returns whether the weights' sum, by which gradients are divided, is above 0.
bool CompiledModel::updates(const std::vector<Input>& inputs, std::size_t step) const {
  const bool by_weight = impl_.compiled->loss.reduction() == Reduction::mean_with_sample_weight;
  bool has_weight = false;
  for (const auto& input : inputs) {
    if (step >= input.size() || input[step].size() == 0) continue;
    const auto& weight = input[step].weight;
    const double sum = by_weight && weight.defined() ? weight.sum().item<double>() : 1;
    require(sum >= 0 && !std::isinf(sum), "a replica's weight", sum, "0 (no examples) or more, and finite");
    has_weight = has_weight || sum > 0;
  }
  return has_weight;
}

// Returns the seeds that the same steps have on other devices. Evaluation and prediction draw no numbers.
std::vector<std::vector<std::uint64_t>> CompiledModel::seeds(Kind kind, int count) const {
  std::vector<std::vector<std::uint64_t>> seeds(static_cast<std::size_t>(impl_.strategy.num_local_replicas()));
  for (std::size_t replica = 0; replica < seeds.size(); ++replica) {
    for (int step = 0; step < count; ++step) {
      if (kind != Kind::train) {
        seeds[replica].push_back(0);
        continue;
      }
      const ReplicaContext context(static_cast<int>(replica), unwrap(impl_.strategy));
      seeds[replica].push_back(mix(impl_.state.seed, static_cast<std::uint64_t>(impl_.state.steps + step),
                                   static_cast<std::uint64_t>(impl_.number_of(context))));
    }
  }
  return seeds;
}

// Throws for labels that are no class, as the loss does where it sees values. A program would leave these examples out.
void CompiledModel::check_labels(const Example& part, const Compiled& compiled) const {
  if (part.size() > 0 && part.weight.defined()) train::require_sample_weights(part.weight);
  if (part.size() == 0 || impl_.compiled->loss.name() != "sparse_categorical_crossentropy") return;
  auto sizes = compiled.output_sizes;
  sizes[0] = part.size();
  train::class_labels("SparseCategoricalCrossentropy", part.y, at::empty({1}).expand(sizes));
}

void CompiledModel::fetch_for_forward() const { impl_.parameters->fetch(unwrap(impl_.strategy).deadline()); }

// Reads the batches, and begins to copy them to the devices, also while these compute.
std::unique_ptr<CompiledModel::Launch> CompiledModel::launch(Kind kind, std::vector<Parts>& batches) {
  auto launch = std::make_unique<Launch>();
  launch->kind = kind;
  launch->inputs = read(batches);
  const auto& inputs = launch->inputs;
  std::vector<bool> here;
  for (std::size_t step = 0; step < inputs[0].size(); ++step)
    here.push_back(kind == Kind::train && updates(inputs, step));
  const auto& workers = impl_.topology.all;
  const auto all =
      agree_on_launch(workers, workers.size() == 1 ? "" : described(kind, inputs), inputs, std::move(here));
  launch->compiled = program_for(kind, inputs, all);
  const auto& compiled = *launch->compiled;
  const auto count = static_cast<std::size_t>(steps(kind, inputs));
  std::vector<Tensors> filled(inputs.size());
  unwrap(impl_.strategy).replicas().run([&](int replica) {
    const auto& parts = inputs[static_cast<std::size_t>(replica)];
    for (const auto& part : parts)
      if (kind != Kind::predict) check_labels(part, compiled);
    std::vector<Tensors> of_steps;
    for (std::size_t step = 0; step < count; ++step) {
      const auto& part = step < parts.size() ? parts[step] : parts.back();
      auto& tensors = of_steps.emplace_back(filled_up(part, compiled.rows, all.row));
      tensors.push_back(counts_of(step < parts.size() ? part.size() : 0, compiled.rows));
    }
    auto& mine = filled[static_cast<std::size_t>(replica)];
    for (std::size_t i = 0; i < of_steps[0].size(); ++i) {
      Tensors stacked;
      for (const auto& tensors : of_steps) stacked.push_back(tensors[i]);
      mine.push_back(count == 1 ? stacked[0] : at::stack(stacked));
    }
  });
  launch->updates = all.updates;
  launch->updates.resize(count, false);
  launch->copied = compiled.program->copy(filled);
  return launch;
}

std::vector<std::vector<Tensor>> CompiledModel::run(Launch& launch, const std::function<void()>& meanwhile) const {
  const auto count = static_cast<int>(launch.updates.size());
  const auto launched = launch.compiled->program->launch(
      {.inputs = std::move(launch.copied), .seeds = seeds(launch.kind, count), .updates = std::move(launch.updates)});
  return owner_.results(unwrap(impl_.strategy), *launched, meanwhile);
}

// results: [replica][result], of several steps [step, ...].
std::vector<PerReplica<StepResult>> CompiledModel::counted(const Launch& launch,
                                                           const std::vector<std::vector<Tensor>>& results,
                                                           Tracker& tracker) const {
  const auto& inputs = launch.inputs;
  const auto of_step = [&](const Tensor& all, std::size_t step) {
    return steps(launch.kind, inputs) == 1 ? all : all.select(0, static_cast<std::int64_t>(step));
  };
  std::vector<PerReplica<StepResult>> counted;
  for (std::size_t step = 0; step < inputs[0].size(); ++step) {
    std::vector<StepResult> of_replicas;
    for (std::size_t replica = 0; replica < inputs.size(); ++replica) {
      const auto& part = inputs[replica][step];
      if (part.size() == 0) {
        of_replicas.emplace_back();
        continue;
      }
      const auto sums = of_step(results[replica][0], step);
      of_replicas.push_back({sums[0].item<double>(), sums[1].item<double>(), part.size()});
      if (!has_metrics()) continue;
      const auto outputs = of_step(results[replica][1], step);
      tracker.update(static_cast<int>(replica), part, outputs.narrow(0, 0, part.size()));
    }
    counted.emplace_back(std::move(of_replicas));
  }
  return counted;
}

std::vector<PerReplica<StepResult>> CompiledModel::train(std::vector<Parts>& batches, Tracker& tracker,
                                                         std::unique_ptr<Prepared> prepared,
                                                         const std::function<void()>& meanwhile) {
  Lap lap;
  if (!prepared) prepared = prepare(batches);
  auto& launch = static_cast<Launch&>(*prepared);
  const auto results = run(launch, meanwhile);
  for (std::size_t replica = 0; replica < launch.inputs.size(); ++replica) {
    for (const auto& part : launch.inputs[replica])
      impl_.parameters->count_examples(static_cast<int>(replica), static_cast<double>(part.size()));
  }
  auto all = counted(launch, results, tracker);
  impl_.state.steps += static_cast<std::int64_t>(all.size());
  impl_.times.steps += static_cast<std::int64_t>(all.size());
  lap.add_to(impl_.times.total);
  return all;
}

PerReplica<StepResult> CompiledModel::evaluate(Parts& batch, Tracker& tracker) {
  std::vector<Parts> one{std::move(batch)};
  const auto evaluation = launch(Kind::evaluate, one);
  const auto results = run(*evaluation);
  return counted(*evaluation, results, tracker)[0];
}

std::vector<Tensor> CompiledModel::predict(Parts& batch) {
  std::vector<Parts> one{std::move(batch)};
  const auto prediction = launch(Kind::predict, one);
  const auto results = run(*prediction);
  std::vector<Tensor> outputs;
  for (std::size_t replica = 0; replica < results.size(); ++replica) {
    const auto rows = prediction->inputs[replica][0].size();
    outputs.push_back(rows > 0 ? results[replica][0].narrow(0, 0, rows) : Tensor());
  }
  return outputs;
}

}  // namespace lockstep::programs
