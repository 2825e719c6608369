// fit with ModelParallelStrategy, drawn by seeds: each computes what a plain loop of LibTorch in one process does, or
// throws on every rank.
#include "drawn_mesh_run.h"
#include "meshes.h"

namespace lockstep {
namespace {

// A larger rate lets attention become so steep that rounding errors grow by five digits in a few steps.
constexpr double kLearningRate = 0.01, kMomentum = 0.9;

struct MeshFitProgram {
  MeshLoop loop;  // its net, axes, plan, sharding and schedule
  std::int64_t examples = 0, batch = 0;
  int epochs = 1;
  double clip = 0;
  bool adam = false, sharded_state = false, measured_stages = false;

  bool of_layers() const { return loop.has("pipeline"); }
  std::string text() const {
    auto of = loop;
    of.steps.clear();
    return lockstep::text(of.text(), ", ", examples, " in batches of ", batch, ", ", epochs, " epochs, ",
                          adam ? "Adam" : "momentum", clip > 0 ? lockstep::text(", clip ", clip) : "",
                          sharded_state ? ", sharded state" : "", measured_stages ? ", measured stages" : "");
  }
};

// The output of the model is whole.
void make_logits_whole(ParallelPlan& plan) {
  for (auto& [name, style] : plan) {
    if (auto* const rows = std::get_if<RowwiseParallel>(&style)) rows->divided_logits = false;
    auto* const columns = std::get_if<ColwiseParallel>(&style);
    if (columns != nullptr && name.ends_with(".head")) columns->output = Replicate();
  }
}

MeshFitProgram draw_mesh_fit(std::uint64_t seed) {
  MeshFitProgram program{.loop = draw_mesh_loop(seed)};
  auto& loop = program.loop;
  Draw draw(seed + 1'000'000);
  loop.net.dtype = at::kDouble;
  for (auto& kind : loop.net.layers) {
    if (kind == Kind::batch_norm) kind = Kind::layer_norm;
  }
  if (loop.plan.divided_logits && !loop.plan.wrong) make_logits_whole(loop.plan.plan);
  if (loop.plan.plan.empty() && loop.size("tensor") > 1) loop.plan.wrong = true;
  loop.max_norm = loop.penalty = loop.balance = 0;
  loop.adamw = loop.ddp = loop.scaled = false;
  program.examples = draw.between(3, 14);
  program.batch = draw.between(2, 6);
  program.epochs = draw.between(1, 2);
  if (draw.chance(40)) program.clip = draw.one_of({0.05, 0.5, 1e9});
  program.adam = draw.chance(50);
  program.sharded_state = loop.has("data") && !loop.has("shard") && draw.chance(30);
  program.measured_stages = loop.has("pipeline") && draw.chance(10);
  return program;
}

// --- in one process

// Updates as Keras does, with one more rule: a parameter without a gradient stays.
class KerasUpdates {
 public:
  KerasUpdates(const MeshFitProgram& program, std::vector<at::Tensor> parameters)
      : program_(program), parameters_(std::move(parameters)) {
    for (const auto& each : parameters_) {
      first_.push_back(at::zeros_like(each).detach());
      second_.push_back(at::zeros_like(each).detach());
    }
  }

  void step() {
    const at::NoGradGuard no_grad;
    double squares = 0;
    for (const auto& each : parameters_) squares += each.grad().defined() ? each.grad().pow(2).sum().item<double>() : 0;
    const double factor = program_.clip > 0 ? program_.clip / std::max(program_.clip, std::sqrt(squares)) : 1;
    ++steps_;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (!parameters_[i].grad().defined()) continue;
      const auto gradient = parameters_[i].grad() * factor;
      if (!program_.adam) {
        parameters_[i].add_(first_[i].mul_(kMomentum).sub_(gradient, kLearningRate));
        continue;
      }
      first_[i].mul_(0.9).add_(gradient, 0.1);
      second_[i].mul_(0.999).add_(gradient.pow(2), 0.001);
      const double rate = kLearningRate * std::sqrt(1 - std::pow(0.999, steps_)) / (1 - std::pow(0.9, steps_));
      parameters_[i].sub_(rate * first_[i] / (second_[i].sqrt() + kEpsilon));
    }
  }

  static constexpr double kEpsilon = 1e-3;

 private:
  const MeshFitProgram& program_;
  const std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> first_, second_;
  int steps_ = 0;
};

DrawnData data_of(const MeshFitProgram& program) {
  auto data = make_mesh_data(program.loop.net, program.examples, program.loop.net.seed);
  if (program.loop.negative_id) data.x.view({-1}).narrow(0, 0, 1).fill_(-1);
  return data;
}

struct PlainFit {
  Values results;  // "loss" of each epoch, of evaluation at the end, and the outputs
  Values weights;
};

PlainFit fit_plainly(const MeshFitProgram& program) {
  const auto data = data_of(program);
  MeshNet net(program.loop.net, 0, program.loop.net.count());
  KerasUpdates updates(program, trained_of(net->parameters()));
  PlainFit fit;
  auto& values = fit.results;
  for (int epoch = 0; epoch < program.epochs; ++epoch) {
    double sum = 0;
    for (std::int64_t begin = 0; begin < program.examples; begin += program.batch) {
      const auto batch = data.slice(begin, std::min(begin + program.batch, program.examples));
      net->zero_grad();
      const auto loss = drawn_loss(net(batch.x), batch.y);
      loss.backward();
      updates.step();
      sum += loss.item<double>() * static_cast<double>(batch.x.size(0));
    }
    values[text("loss ", epoch)] = at::scalar_tensor(sum / static_cast<double>(program.examples), at::kDouble);
  }
  const at::NoGradGuard no_grad;
  values["output"] = net(data.x);
  values["loss"] = drawn_loss(values["output"], data.y);
  fit.weights = values_of(*net);
  return fit;
}

// --- on a mesh

PipelineStage layer_of(const MeshNetOptions& net, int i, const Communicator* experts) {
  const auto prefix = std::to_string(i) + ".";
  const auto with_values = [=](auto layer) {
    set_values(*layer, net, prefix);
    return layer;
  };
  if (i == 0) return [=] { return with_values(MeshFront(net)); };
  if (i + 1 == net.count()) return [=] { return with_values(MeshHead(net, at::Tensor())); };
  const auto kind = net.layers[static_cast<std::size_t>(i - 1)];
  if (kind < Kind::feed_forward)
    return [=] { return with_values(DrawnBlock(net.of_block(), static_cast<Block>(kind))); };
  return [=] { return with_values(MeshBlock(net, kind, experts)); };
}

ModelParallelOptions options_of(const MeshFitProgram& program) {
  const auto& loop = program.loop;
  ModelParallelOptions options{.device = "cpu:0", .threads_per_replica = 1};
  if (loop.has("tensor")) options.plan = loop.plan.plan;
  if (loop.has("shard")) options.fully_shard = loop.sharding;
  if (loop.has("context") && loop.net.places) options.context_plan = {{"0.place.weight", Shard{0}}};
  options.shard_optimizer_state = program.sharded_state;
  if (!loop.has("pipeline")) return options;
  options.schedule = loop.schedule;
  options.microbatches = loop.microbatches;
  options.stages_per_rank = loop.stages_of_rank;
  options.recompute = loop.net.recompute;
  const int count = loop.net.count(), stages = loop.stages();
  for (int i = 0; i < stages && !program.measured_stages; ++i)
    options.layers_of_stages.push_back((i + 1) * count / stages - i * count / stages);
  if (loop.net.tie != Tie::none) options.tied = {{"0.token.weight", text(count - 1, ".head.weight")}};
  return options;
}

Model make_model(const MeshFitProgram& program, const DeviceMesh& mesh) {
  const auto& loop = program.loop;
  static const Communicator alone;
  const auto* const experts = loop.has("expert") ? &mesh["expert"] : &alone;
  const auto make = [&] {
    if (!program.of_layers())
      return Model([&loop, experts] { return MeshNet(loop.net, 0, loop.net.count(), experts); });
    std::vector<PipelineStage> layers;
    for (int i = 0; i < loop.net.count(); ++i) layers.push_back(layer_of(loop.net, i, experts));
    return Model(layers);
  };
  auto model = make();
  const auto clip = program.clip > 0 ? std::optional(program.clip) : std::nullopt;
  const Optimizer adam =
      Adam({.learning_rate = kLearningRate, .epsilon = KerasUpdates::kEpsilon, .global_clipnorm = clip});
  const Optimizer momentum = SGD({.learning_rate = kLearningRate, .momentum = kMomentum, .global_clipnorm = clip});
  model.compile(
      {.optimizer = program.adam ? adam : momentum, .loss = SparseCategoricalCrossentropy({.from_logits = true})});
  return model;
}

// Tied parameters under all their names.
void add_weights(Values& values, const Model& model) {
  const auto whole = whole_weights(model);
  const auto& parameters = unwrap(model.module());
  for (const auto& slot : parameters.slots()) {
    values[slot.name] = whole.at(slot.name).to(at::kDouble);
    for (const auto& alias : slot.aliases) values[alias] = values[slot.name];
  }
  for (std::size_t i = 0; i < parameters.buffer_names().size(); ++i)
    values[parameters.buffer_names()[i]] =
        parameters.buffer(0, i).to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
}

Values fit_on_rank(const MeshFitProgram& program, const DeviceMesh& mesh) {
  const ModelParallelStrategy strategy(mesh, options_of(program));
  const auto scope = strategy.scope();
  auto model = make_model(program, mesh);
  const auto data = data_of(program);
  const auto batches = Dataset::from_tensor_slices(data.x, data.y).batch(program.batch);
  const auto history = model.fit(batches, {.epochs = program.epochs, .verbose = 0, .handle_signals = false}).history;
  Values values;
  for (std::size_t i = 0; i < history.at("loss").size(); ++i)
    values[text("loss ", i)] = at::scalar_tensor(history.at("loss")[i], at::kDouble);
  values["output"] = model.predict(batches).to(at::kDouble);
  values["loss"] = at::scalar_tensor(model.evaluate(batches, {.verbose = 0})["loss"], at::kDouble);
  add_weights(values, model);
  mesh.ranks().check_all_agree("ends of a drawn program", "");  // a rank hears of what another one threw
  return values;
}

// Returns what this rank should have found: all results, and the weights that it has.
Values expected_of(const MeshFitProgram& program, const PlainFit& fit, const Values& found) {
  auto expected = fit.results;
  for (const auto& [name, value] : found) {
    const bool tied = name.ends_with(".head.weight") && program.of_layers() && program.loop.net.tie != Tie::none;
    const auto one = fit.weights.find(tied ? "0.token.weight" : name);
    if (one != fit.weights.end()) expected[name] = one->second;
  }
  return expected;
}

DrawnResult run_mesh_fit(std::uint64_t seed) {
  const auto program = draw_mesh_fit(seed);
  std::optional<PlainFit> exact;
  std::string refused_by_libtorch;
  try {
    exact = fit_plainly(program);
  } catch (const c10::Error& error) {
    refused_by_libtorch = error.what_without_backtrace();
  }
  auto weights = exact ? exact->weights : Values();
  if (program.loop.has("shard")) {  // units have a layer that is registered twice under its first name
    std::erase_if(weights, [](const auto& each) { return each.first.find(".second.") != std::string::npos; });
  }
  return run_on_drawn_mesh(program.loop, program.text(), weights, refused_by_libtorch, [&](const DeviceMesh& mesh) {
    MeshRankEnd end{fit_on_rank(program, mesh), {}};
    if (exact) end.exact = expected_of(program, *exact, end.found);
    return end;
  });
}

// Failed once, and run always.
const std::vector<KeptSeed> kKeptFits{
    {17, KeptSeed::Ends::refused},  // experts were measured on one rank, which waited for the others
    {39},                           // in stages, a rank without examples computed the loss of two for each microbatch
};

TEST(DrawnMeshes, FitsComputeAsOneProcessOrAreRefused) {
  at::set_num_threads(1);
  check_drawn_programs(kKeptFits, 4, 0.1, run_mesh_fit);
}

}  // namespace
}  // namespace lockstep
