// Model: compile, fit, evaluate, predict, as in Keras, over the replicas of a strategy.
//
// A Model is a shared handle; it keeps its strategy alive. One thread at a time uses it.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <iosfwd>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/data/dataset.h"
#include "lockstep/optimizer/optimizer.h"
#include "lockstep/strategy/module_factory.h"
#include "lockstep/strategy/pipeline_stage.h"
#include "lockstep/strategy/replicated.h"
#include "lockstep/strategy/strategy.h"
#include "lockstep/train/callback.h"
#include "lockstep/train/layers.h"
#include "lockstep/train/logs.h"
#include "lockstep/train/loss.h"
#include "lockstep/train/metric.h"

namespace lockstep {

// Options here and below are in the order of the arguments of keras.Model.
struct CompileOptions {
  Optimizer optimizer = "rmsprop";
  Loss loss;
  std::vector<Metric> metrics = {};           // computed without sample weights
  std::vector<Metric> weighted_metrics = {};  // computed with sample weights

  // On one GPU: after three batches of one shape, records a step as a CUDA graph and replays it for each further one.
  // The host's part of the model is not run again. So every step must call the same operators, whatever the data. A
  // metric that throws does so after the step's update. Not where the loss is scaled or examples have weights; on CPUs
  // it changes nothing.
  bool jit_compile = false;

  // Steps between two calls of the callbacks' batch methods. With TPUStrategy they are launched together, so that the
  // host is waited for less often. Not for elastic strategies and parameter servers.
  std::int64_t steps_per_execution = 1;
};

struct FitOptions {
  // A value of steps_per_epoch: the epoch lasts until a callback ends it by stop_training.
  static constexpr std::int64_t kEndless = std::numeric_limits<std::int64_t>::max();

  int epochs = 1;
  int verbose = -1;  // 0: silent, 1: progress bar, 2: a line an epoch; -1: 1 on a terminal, else 2
  std::vector<AnyCallback> callbacks = {};
  std::optional<Dataset> validation_data = {};
  std::map<std::int64_t, double> class_weight = {};  // by label; 1 for labels that are not in it
  int initial_epoch = 0;
  std::int64_t steps_per_epoch =
      0;  // 0: the whole data set each epoch; else the next epoch goes on where the last ended
  std::int64_t validation_steps = 0;  // 0: all of validation_data
  int validation_freq = 1;            // epochs between validations
  bool handle_signals = true;         // SIGINT and SIGTERM end the step, save, and throw Interrupted
};

struct EvaluateOptions {
  int verbose = 0;
  std::int64_t steps = 0;  // 0: all
};

struct PredictOptions {
  std::int64_t steps = 0;  // 0: all
};

struct LoadWeightsOptions {
  bool skip_mismatch = false;  // variables that have another shape in the file stay as they are
  bool by_name = false;        // variables that the file lacks stay as they are; others in the file are passed over
};

// Seconds that replica 0 spent in each part of the train steps so far; input: the thread that calls fit.
struct StepTimes {
  std::int64_t steps = 0;
  double input = 0, forward = 0, backward = 0, reduce_and_update = 0, metrics = 0, total = 0;
};

class ModelImpl;

class Model {
 public:
  // Your own torch module: `factory` returns a module holder or a shared_ptr to a module with `Tensor forward(Tensor)`,
  // another one at each call. Made for the strategy in scope.
  template <class Factory>
  requires(!std::derived_from<Factory, Model>) explicit Model(const Factory& factory)
      : Model(internal::maker(factory), internal::forward_of<Factory>()) {}

  // Layers one after the other, "0", "1", ...: each by the function that makes it. With a ModelParallelStrategy whose
  // mesh has an axis for pipelines, stretches of them are the stages. It has variables once it is built, by the first
  // batch of fit or by `build`.
  explicit Model(std::vector<PipelineStage> layers);

  // Sets what fit trains with, and starts its state (momenta, iterations) anew.
  void compile(CompileOptions options);

  // Trains. `data` yields batches of x and y, and maybe sample weights. With N replicas each batch is split among them;
  // the updates are those of the whole batch. Throws InvalidArgument, what data set and callbacks throw, what a
  // replica's step throws (weights are then those of the step before; BatchNorm's running statistics may have moved),
  // and Interrupted.
  History fit(const Dataset& data, const FitOptions& options = {});

  // Loss and metrics over the data set, each example once. Workers that read the same batches (AutoShardPolicy::data)
  // must have the same data: throws InvalidArgument on all where contents, order or lengths differ. With
  // AutoShardPolicy::file each worker evaluates its files, with off all of its own data. Collective over the workers.
  // Throws also what the data set and metrics throw.
  Logs evaluate(const Dataset& data, const EvaluateOptions& options = {});

  // The outputs for all examples, in order: [examples, ...], in host memory. All workers must read the same batches, as
  // for evaluate. Throws InvalidArgument for data without examples, and for outputs whose shapes differ beside the
  // first dimension.
  Tensor predict(const Dataset& data, const PredictOptions& options = {});

  // Makes one step on one global batch, as in Keras. Returns loss and metrics. One worker's error ends the training.
  Logs train_on_batch(const Example& batch);

  // The sizes of an input without its batch dimension; fit does this with the first batch.
  void build(const std::vector<std::int64_t>& input_shape, at::ScalarType dtype = at::kFloat);

  // Layers or parameters with shapes and counts: those of this process where others have other stages. Throws
  // InvalidArgument before the model is built.
  std::string summary() const;

  // safetensors under the module's parameter and buffer names. `path` as ModelCheckpoint and latest_checkpoint give it;
  // a model that is not built yet takes the weights when it is. Loading throws as read_archive, and InvalidArgument
  // naming all that differs. With options it throws InvalidArgument where no variable of the model is in the file, and
  // a warning names what the options pass over. Where it throws, nothing has changed. Values of float16 and bfloat16
  // are converted for variables of float32 and float64, which is exact; other dtypes must be the variables' own.
  void save_weights(const std::string& path) const;
  void load_weights(const std::string& path, const LoadWeightsOptions& options = {});

  // The full state: weights, optimizer, steps, random state, and, in fit, its progress and callbacks.
  void save_checkpoint(const std::string& path) const;
  void load_checkpoint(const std::string& path);

  double learning_rate() const;
  void set_learning_rate(double rate);
  std::int64_t iterations() const;

  // fit ends after this step or epoch. Called in a step of several workers, which agree on the end, after the next
  // step.
  void stop_training();

  Strategy strategy() const;
  // Throws InvalidArgument before the model is built. With parameter servers, as they are now.
  ReplicatedModule module() const;
  ReplicatedOptimizer optimizer() const;  // throws it also before compile

  // Replica 0's own module, as the factory made it: for torch::save, for a forward of your own (call eval() before and
  // train() after the forward), or to read its members. All replicas have the same parameters; change them by fit, or
  // by load_weights. Its requires_grad holds for all replicas from the next epoch (with parameter servers: the next
  // fit) or train_on_batch on. Compile again before a parameter is trained that was frozen when the model was compiled.
  // Buffers, such as those of BatchNorm, are replica 0's own. Evaluation, prediction and save_weights use the replicas'
  // mean, in which a replica counts by the examples that it has seen. Throws InvalidArgument where the module is not an
  // M.
  template <class M>
  std::shared_ptr<M> module() const {
    auto found = std::dynamic_pointer_cast<M>(first_module());
    if (found == nullptr)
      throw InvalidArgument("module<M>: the model's module is no M (of a holder Net, M is NetImpl)");
    return found;
  }
  StepTimes step_times() const;

 protected:
  explicit Model(std::shared_ptr<ModelImpl> impl) : impl_(std::move(impl)) {}

 private:
  friend struct internal::Unwrap;
  std::shared_ptr<torch::nn::Module> first_module() const;

  Model(const internal::MakeModule& make, internal::ForwardOfModule forward);

  std::shared_ptr<ModelImpl> impl_;
};

// A stack of layers. Sizes are inferred from the first batch, or by build.
class Sequential : public Model {
 public:
  Sequential(std::initializer_list<Layer> layers) : Sequential(std::vector<Layer>(layers)) {}
  explicit Sequential(std::vector<Layer> layers);

  const std::vector<Layer>& layers() const { return layers_; }

 private:
  std::vector<Layer> layers_;
};

}  // namespace lockstep
