// Estimator: a function says what a model is, Estimator trains it from where its last checkpoint left off, evaluates it
// and predicts. Names and defaults are those of tf.estimator.
//
//   MirroredStrategy distribution;
//   Estimator classifier(model_fn, {.model_dir = "model", .train_distribute = distribution});
//   classifier.train(input_fn, {.steps = 1000});
//   const Logs result = classifier.evaluate(input_fn);
//
// One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/data/dataset.h"
#include "lockstep/strategy/strategy.h"
#include "lockstep/train/callback.h"
#include "lockstep/train/model.h"

namespace lockstep {

enum class ModeKeys { train, evaluate, predict };

// Predictions by name: [examples, ...] each.
using Predictions = std::map<std::string, Tensor>;

// The result of model_fn for a mode.
struct EstimatorSpec {
  Model model;
  std::optional<Loss> loss = {};            // for train and evaluate
  std::optional<Optimizer> optimizer = {};  // for train: what TensorFlow's train_op minimizes with
  std::vector<Metric> eval_metric_ops = {};
  std::function<Predictions(const Tensor& outputs)> predictions = {};  // of all outputs; else {"output": outputs}
  std::vector<AnyCallback> training_hooks = {};
};

// Hyperparameters by name, for model_fn.
class Params : public std::map<std::string, double> {
 public:
  using std::map<std::string, double>::map;
  double at(const std::string& name) const;  // throws InvalidArgument listing the names that there are
};

// Called once in each train, evaluate and predict, in the scope of the strategy. `features`: the first batch of the
// input, for its shapes and dtypes, with labels where the input has them. All modes make the same variables.
using ModelFn = std::function<EstimatorSpec(const Example& features, ModeKeys mode, const Params& params)>;

// Called once in each train, evaluate and predict: batches. With a strategy of several replicas each batch is split
// among them, as in fit.
using InputFn = std::function<Dataset()>;

struct RunConfig {
  // Checkpoints model.ckpt-STEP and event files for TensorBoard. Empty: a temporary folder, removed with the Estimator.
  std::string model_dir = {};
  std::uint64_t tf_random_seed = 1;  // of everything random, set when train begins

  std::int64_t save_checkpoints_steps = 0;  // 0: by time
  double save_checkpoints_secs = 600;       // with several workers looked at every 100 steps
  int keep_checkpoint_max = 5;              // 0: all
  std::int64_t log_step_count_steps = 100;  // steps between lines with loss and speed; 0: none
  std::int64_t save_summary_steps = 100;    // steps between points in the event file; 0: none

  std::optional<Strategy> train_distribute = {};  // else OneDeviceStrategy
  std::optional<Strategy> eval_distribute = {};   // of evaluate and predict; else as train
};

// At most one of `steps` (more) and `max_steps` (in all). 0: until the data end; endless data need one of them.
struct TrainOptions {
  std::int64_t steps = 0;
  std::int64_t max_steps = 0;
  std::vector<AnyCallback> hooks = {};
};

struct EvalOptions {
  std::int64_t steps = 0;            // 0: all
  std::string name = {};             // the event file is in model_dir/eval_NAME
  std::string checkpoint_path = {};  // empty: the latest
};

struct EstimatorPredictOptions {
  std::vector<std::string> predict_keys = {};  // empty: all
  std::string checkpoint_path = {};
};

struct TrainSpec;
struct EvalSpec;

class Estimator {
 public:
  // Throws InvalidArgument for a config that is out of range, or an empty function.
  explicit Estimator(ModelFn model_fn, RunConfig config = {}, Params params = {});

  // Goes on from the latest checkpoint: weights, optimizer, step, random state, and the place in data that had not
  // ended. Saves a checkpoint when training begins anew, when it ends, and as the config says. Throws as Model::fit.
  Estimator& train(const InputFn& input_fn, const TrainOptions& options = {});

  // Loss, metrics and global_step at the latest checkpoint. Throws InvalidArgument where there is none.
  Logs evaluate(const InputFn& input_fn, const EvalOptions& options = {});

  // A row for each example, in order.
  Predictions predict(const InputFn& input_fn, const EstimatorPredictOptions& options = {});

  const std::string& model_dir() const;
  std::string latest_checkpoint() const;  // empty where there is none
  const RunConfig& config() const;
  const Params& params() const;

 private:
  friend Logs train_and_evaluate(Estimator&, const TrainSpec&, const EvalSpec&);
  struct State;
  std::shared_ptr<State> state_;
};

struct TrainSpec {
  InputFn input_fn;
  std::int64_t max_steps = 0;
  std::vector<AnyCallback> hooks = {};
};

struct EvalSpec {
  InputFn input_fn;
  std::int64_t steps = 100;  // 0: all
  std::string name = {};
  double throttle_secs = 600;  // no evaluation sooner than this after the one before
};

// Trains, and evaluates whenever a checkpoint was saved and at the end. Returns the last evaluation.
Logs train_and_evaluate(Estimator& estimator, const TrainSpec& train_spec, const EvalSpec& eval_spec);

// Ends training after `num_steps` more steps, or when the step in all is `last_step`. Exactly one is given.
struct StopAtStepOptions {
  std::int64_t num_steps = 0;
  std::int64_t last_step = 0;
};
class StopAtStepHook : public Callback {
 public:
  explicit StopAtStepHook(const StopAtStepOptions& options);
  void on_train_begin() override;
  void on_train_batch_begin(std::int64_t batch) override;
  void on_train_batch_end(std::int64_t batch, const Logs& logs) override;
  Order order() const override { return Order::needs_state; }

 private:
  StopAtStepOptions options_;
  std::int64_t last_step_ = 0;
  bool asked_ = false;
};

}  // namespace lockstep
