#include "lockstep/estimator.h"

#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <limits>

#include "base/log.h"
#include "base/text.h"
#include "front_ends/estimator/checkpoint_saver.h"
#include "lockstep/base/error.h"
#include "lockstep/base/random.h"
#include "strategy/split.h"
#include "train/model_impl.h"

namespace lockstep {
namespace {

RunConfig checked(RunConfig config) {
  require(config.save_checkpoints_steps >= 0, "Estimator: save_checkpoints_steps", config.save_checkpoints_steps,
          "0 (by time) or more");
  require(config.save_checkpoints_secs > 0, "Estimator: save_checkpoints_secs", config.save_checkpoints_secs,
          "above 0");
  require(config.keep_checkpoint_max >= 0, "Estimator: keep_checkpoint_max", config.keep_checkpoint_max,
          "0 (all) or more");
  require(config.log_step_count_steps >= 0, "Estimator: log_step_count_steps", config.log_step_count_steps,
          "0 (none) or more");
  require(config.save_summary_steps >= 0, "Estimator: save_summary_steps", config.save_summary_steps,
          "0 (none) or more");
  return config;
}

std::string temporary_folder() {
  auto folder = (std::filesystem::temp_directory_path() / "lockstep-model-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) throw IoError(text("Estimator: no temporary folder ", folder, " can be made"));
  return folder;
}

Dataset called(const InputFn& input_fn) {
  if (!input_fn) throw InvalidArgument("Estimator: input_fn is empty");
  return input_fn();
}

const char* name_of(ModeKeys mode) {
  return mode == ModeKeys::train ? "train" : mode == ModeKeys::evaluate ? "evaluate" : "predict";
}

}  // namespace

struct Estimator::State {
  State(ModelFn function, RunConfig asked, Params hyperparameters)
      : model_fn(std::move(function)),
        temporary(asked.model_dir.empty()),
        config(checked(std::move(asked))),
        params(std::move(hyperparameters)) {
    if (!model_fn) throw InvalidArgument("Estimator: model_fn is empty");
    if (temporary) config.model_dir = temporary_folder();
  }
  ~State() {
    std::error_code ignored;
    if (temporary) std::filesystem::remove_all(config.model_dir, ignored);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  const Strategy& strategy(ModeKeys mode) {
    auto& chosen = mode != ModeKeys::train && config.eval_distribute ? config.eval_distribute : config.train_distribute;
    if (!chosen) chosen = OneDeviceStrategy();
    return *chosen;
  }

  // The model of a mode, with its variables. Called in the strategy's scope.
  EstimatorSpec make(ModeKeys mode, const Dataset& data) {
    const auto features = strategy::first_element(data, unwrap(strategy(mode)).local_replicas());
    if (!features.x.defined()) throw InvalidArgument("Estimator: input_fn's data are empty");
    strategy::check_batch(features);
    auto spec = model_fn(features, mode, params);
    const auto& made = unwrap(spec.model);
    if (&unwrap(made.strategy) != &unwrap(strategy(mode)) || made.compiled) {
      throw InvalidArgument(
          "Estimator: model_fn returned a model that it did not make in this call, or compiled itself");
    }
    if (mode != ModeKeys::predict && !spec.loss) throw missing("loss", mode);
    if (mode == ModeKeys::train && !spec.optimizer) throw missing("optimizer", mode);
    if (mode != ModeKeys::predict) {
      spec.model.compile({.optimizer = mode == ModeKeys::train ? *spec.optimizer : Optimizer("sgd"),
                          .loss = *spec.loss,
                          .metrics = mode == ModeKeys::evaluate ? spec.eval_metric_ops : std::vector<Metric>()});
    }
    unwrap(spec.model).build(features);
    return spec;
  }

  static InvalidArgument missing(const char* what, ModeKeys mode) {
    return InvalidArgument(
        text("Estimator: the EstimatorSpec that model_fn returned for ", name_of(mode), " has no ", what));
  }

  // Loads a checkpoint's weights and returns its step.
  std::int64_t restore(Model& model, std::string path) const {
    const auto& workers = unwrap(model).topology.all;
    if (path.empty())
      path = workers.broadcast(workers.rank() == 0 ? lockstep::latest_checkpoint(config.model_dir) : "");
    if (path.empty()) {
      throw InvalidArgument(text("Estimator: there is no checkpoint in ", config.model_dir,
                                 " to evaluate or predict with; call train first, or name one in checkpoint_path"));
    }
    auto& state = unwrap(model).state;
    auto archive = state.read(path);
    const bool trained = archive.entries.contains("optimizer/iterations");
    const auto steps = trained ? archive.integer("optimizer/iterations") : 0;
    state.load_weights(std::move(archive));
    return steps;
  }

  void train(const InputFn& input_fn, const TrainOptions& options, std::function<void()> after_save) {
    require(options.steps >= 0, "Estimator: steps", options.steps, "0 (until the data end) or more");
    require(options.max_steps >= 0, "Estimator: max_steps", options.max_steps, "0 (until the data end) or more");
    if (options.steps > 0 && options.max_steps > 0) {
      throw InvalidArgument(text("Estimator: both steps (", options.steps, ") and max_steps (", options.max_steps,
                                 ") are given; give one of them"));
    }
    const bool limited = options.steps > 0 || options.max_steps > 0;
    const auto scope = strategy(ModeKeys::train).scope();
    unwrap(strategy(ModeKeys::train))
        .topology()
        .all.check_all_agree("Estimators", text("steps ", options.steps, "\nmax_steps ", options.max_steps,
                                                "\nsave_checkpoints_steps ", config.save_checkpoints_steps));
    set_random_seed(config.tf_random_seed);
    const auto data = called(input_fn);
    auto spec = make(ModeKeys::train, data);
    FitOptions fit{.epochs = std::numeric_limits<int>::max(), .verbose = 0};
    fit.callbacks.push_back(estimator::CheckpointSaver(config, std::move(after_save)));
    if (limited) fit.callbacks.push_back(StopAtStepHook({.num_steps = options.steps, .last_step = options.max_steps}));
    fit.callbacks.insert(fit.callbacks.end(), options.hooks.begin(), options.hooks.end());
    fit.callbacks.insert(fit.callbacks.end(), spec.training_hooks.begin(), spec.training_hooks.end());
    if (data.cardinality() == Dataset::kInfinite) {
      if (!limited && options.hooks.empty() && spec.training_hooks.empty()) {
        throw InvalidArgument(
            "Estimator: input_fn's data are endless; give steps or max_steps, or a hook that ends training");
      }
      fit.steps_per_epoch = FitOptions::kEndless;
    }
    spec.model.fit(data, fit);
  }

  Logs evaluate(const InputFn& input_fn, const EvalOptions& options) {
    const auto scope = strategy(ModeKeys::evaluate).scope();
    const auto data = called(input_fn);
    auto spec = make(ModeKeys::evaluate, data);
    const auto step = restore(spec.model, options.checkpoint_path);
    auto logs = spec.model.evaluate(data, {.steps = options.steps});
    if (spec.model.strategy().is_chief()) {
      train::EventFile events(
          (std::filesystem::path(config.model_dir) / (options.name.empty() ? "eval" : "eval_" + options.name))
              .string());
      std::vector<std::string> parts;
      for (const auto& [name, value] : logs) {
        events.scalar(name, step, value);
        parts.push_back(text(name, " = ", value));
      }
      log_info(text("evaluation at step ", step, ": ", join(parts)));
    }
    logs.set("global_step", static_cast<double>(step));
    return logs;
  }

  const ModelFn model_fn;
  const bool temporary;  // the folder is ours
  RunConfig config;
  const Params params;
};

double Params::at(const std::string& name) const {
  const auto found = find(name);
  if (found != end()) return found->second;
  throw InvalidArgument(text("Params: there is no \"", name, "\"; there are ", names_in(*this)));
}

Estimator::Estimator(ModelFn model_fn, RunConfig config, Params params)
    : state_(std::make_shared<State>(std::move(model_fn), std::move(config), std::move(params))) {}

Estimator& Estimator::train(const InputFn& input_fn, const TrainOptions& options) {
  state_->train(input_fn, options, {});
  return *this;
}

Logs Estimator::evaluate(const InputFn& input_fn, const EvalOptions& options) {
  return state_->evaluate(input_fn, options);
}

Predictions Estimator::predict(const InputFn& input_fn, const EstimatorPredictOptions& options) {
  const auto scope = state_->strategy(ModeKeys::predict).scope();
  const auto data = called(input_fn);
  auto spec = state_->make(ModeKeys::predict, data);
  state_->restore(spec.model, options.checkpoint_path);
  const auto outputs = spec.model.predict(data);
  auto all = spec.predictions ? spec.predictions(outputs) : Predictions{{"output", outputs}};
  if (options.predict_keys.empty()) return all;
  Predictions chosen;
  for (const auto& key : options.predict_keys) {
    const auto found = all.find(key);
    if (found == all.end()) {
      throw InvalidArgument(text("Estimator: predict_keys has \"", key, "\"; there are ", names_in(all)));
    }
    chosen.insert(*found);
  }
  return chosen;
}

const std::string& Estimator::model_dir() const { return state_->config.model_dir; }
std::string Estimator::latest_checkpoint() const { return lockstep::latest_checkpoint(model_dir()); }
const RunConfig& Estimator::config() const { return state_->config; }
const Params& Estimator::params() const { return state_->params; }

Logs train_and_evaluate(Estimator& estimator, const TrainSpec& train_spec, const EvalSpec& eval_spec) {
  require(eval_spec.throttle_secs >= 0, "Estimator: throttle_secs", eval_spec.throttle_secs, "0 or more");
  if (!eval_spec.input_fn) throw InvalidArgument("Estimator: the EvalSpec's input_fn is empty");
  auto& state = *estimator.state_;
  const Communicator workers = unwrap(state.strategy(ModeKeys::train)).topology().all;
  auto last = std::chrono::steady_clock::now();
  Logs result;
  bool evaluated = false;  // whether the last checkpoint was
  const auto evaluate = [&] {
    result = state.evaluate(eval_spec.input_fn, {.steps = eval_spec.steps, .name = eval_spec.name});
    last = std::chrono::steady_clock::now();
  };
  const auto after_save = [&] {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - last;
    evaluated = workers.broadcast(passed.count() >= eval_spec.throttle_secs ? "due" : "") == "due";
    if (evaluated) evaluate();
  };
  state.train(train_spec.input_fn, {.max_steps = train_spec.max_steps, .hooks = train_spec.hooks}, after_save);
  if (!evaluated) evaluate();
  return result;
}

StopAtStepHook::StopAtStepHook(const StopAtStepOptions& options) : options_(options) {
  if (options_.num_steps >= 0 && options_.last_step >= 0 && (options_.num_steps > 0) != (options_.last_step > 0))
    return;
  throw InvalidArgument(text("StopAtStepHook: num_steps is ", options_.num_steps, " and last_step ", options_.last_step,
                             "; exactly one must be given, above 0"));
}

void StopAtStepHook::on_train_begin() {
  last_step_ = options_.last_step > 0 ? options_.last_step : model().iterations() + options_.num_steps;
  if (model().iterations() >= last_step_) model().stop_training();
}

// Asks for the stop before the last step, so that all workers agree on it in that step.
void StopAtStepHook::on_train_batch_begin(std::int64_t /*batch*/) {
  asked_ = model().iterations() + 1 >= last_step_ && !unwrap(model()).fit.stopping;
  if (asked_) model().stop_training();
}

// Takes the request back where the step did not count, because its gradients were not finite.
void StopAtStepHook::on_train_batch_end(std::int64_t /*batch*/, const Logs& /*logs*/) {
  if (!asked_ || model().iterations() >= last_step_) return;
  unwrap(model()).fit.stopping = unwrap(model()).fit.agreed_to_stop = false;
}

}  // namespace lockstep
