// What is behind a Model.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "gradient/gradient_path.h"
#include "lockstep/base/random.h"
#include "lockstep/train/model.h"
#include "parallel/pipeline_model.h"
#include "parameter_server/server_cluster.h"
#include "strategy/split.h"
#include "strategy/strategy_impl.h"
#include "train/compiled_model.h"
#include "train/mixed_precision.h"
#include "train/outcome.h"
#include "train/recorded_step.h"
#include "train/tracker.h"

namespace lockstep::train {

class Training;

// How far a fit has come: what a full checkpoint needs besides the model to go on in the middle of an epoch.
struct FitProgress {
  int epoch = 0;           // that is running, or comes next
  std::int64_t batch = 0;  // steps done in it
  Position position;       // in the training data, in batches
  // The position in examples, for going on with batches of another size: how many of the epoch's examples (of a
  // worker's, where each reads its own) have been used. Batches have `batch_size` examples and begin at its multiples;
  // 0: they begin elsewhere. `readers`: how many workers read their own data.
  std::int64_t examples = 0;
  std::int64_t batch_size = 0;
  int readers = 1;
  History history;

  // With parameter servers: the results of steps that workers have made and that do not count in `batch` yet.
  std::vector<std::vector<double>> uncounted;
};

}  // namespace lockstep::train

namespace lockstep {

class ModelImpl {
 public:
  // Prefixes in a full checkpoint: of its state, the callbacks', and replicas' buffers.
  static constexpr const char *kOptimizer = "optimizer", *kCallback = "callback", *kReplica = "replica";

  using Make = std::function<std::shared_ptr<torch::nn::Module>(const Example& sample)>;
  using Forward = std::function<Tensor(torch::nn::Module&, const Tensor&)>;

  using MakeLayers = std::function<parallel::Layers(const Example& sample)>;

  // `layers_of`: where the model is made of layers, which can be cut into stages.
  ModelImpl(Make make_module, Forward forward_of, MakeLayers layers_of = {})
      : make(std::move(make_module)),
        forward(std::move(forward_of)),
        make_layers(std::move(layers_of)),
        model_number(next_model_number()) {}

  std::shared_ptr<ReplicatedParameters> make_parameters(const Example& sample);

  // Makes the replicas for batches like `sample`, unless they are there. Applies weights that were loaded before.
  void build(const Example& sample);

  // The same for the batches of a data set; `caller` begins the error where it is empty. Where a worker cannot, the
  // others are told.
  void build_for(const Dataset& data, const char* caller);
  void make_gradient_path();
  void require_built(const char* caller) const;
  void require_own(const char* caller) const;  // throws InvalidArgument where it is a part of another model
  void require_compiled(const char* caller) const;
  void require_trainable() const;

  // Before a fit, an epoch or a step: replica 0's requires_grad holds for all replicas from now on. Throws
  // InvalidArgument for a parameter of which the optimizer has no state, since it was frozen when the model was
  // compiled.
  void follow_requires_grad();

  // A replica's forward. Throws InvalidArgument naming the batch where LibTorch refuses it.
  Tensor outputs_of(ReplicaContext& replica, const Example& part) const;

  // The same, or undefined for a part without examples: there the replica computes only if all must.
  Tensor outputs_of_any(ReplicaContext& replica, const Example& part) const;

  // The mesh over which the strategy splits models; null: none.
  const parallel::MeshParallelism* mesh() const;

  // This worker's positions of the sequences of examples that others have too.
  Example own_positions(const Example& part) const;

  // Returns an object that must live while the worker computes with these positions; null where it has all.
  std::unique_ptr<ContextParallel> use_context() const { return mesh() ? mesh()->use_context() : nullptr; }

  // On each replica, with its part of the batch: forward, loss, backward, reduce and update, metrics.
  train::StepResult train_step(ReplicaContext& replica, const internal::Part& part, train::Tracker& tracker);

  // Its forward, loss and backward.
  train::ComputedStep compute_gradients(ReplicaContext& replica, const Example& part, StepTimes& spent);

  Example example_of_none(const Example& empty) const;
  train::ComputedStep compute_in_stages(ReplicaContext& replica, const Example& part, train::Tracker& tracker,
                                        StepTimes& spent);
  train::ComputedStep compute_no_gradients(ReplicaContext& replica, const Example& empty);

  // For jit_compile: enqueues the part of a step that can be recorded, and makes a step by replaying the recording.
  train::ComputedStep enqueue_step(ReplicaContext& replica, const Example& batch);
  train::StepResult play_step(ReplicaContext& replica, const Example& part, train::Tracker& tracker);

  // A step on all replicas for each batch, of which there are at most CompileOptions::steps_per_execution; each result
  // is for Tracker::add_batch. Where devices run programs: `prepared` is what `programs` made of the batches, if it
  // has, and `meanwhile` is called while the devices compute.
  std::vector<PerReplica<train::StepResult>> train_batches(std::vector<PerReplica<internal::Part>>& batches,
                                                           train::Tracker& tracker,
                                                           std::optional<train::CompiledModel::Prepared> prepared = {},
                                                           const std::function<void()>& meanwhile = {});
  PerReplica<train::StepResult> train_batch(PerReplica<internal::Part>& batch, train::Tracker& tracker);

  // Throws InvalidArgument where a loss has none.
  static void require_gradient(const Tensor& loss);

  // Calls act(), which is collective over the workers; with an elastic strategy as a section (elastic/sections.h), so
  // that it is called again where one of them is lost meanwhile. Returns its numbers, which are equal on all. `what`:
  // for messages, where no fit runs.
  using Numbers = std::vector<double>;
  Numbers in_section(const std::string& what, const std::function<Numbers()>& act);

  // The same for what each worker does for itself: where it returns on one, all have completed it.
  void on_all_in_section(const std::string& what, const std::function<void()>& act);

  // As collective::check_on_all over topology.peers. `what`: as in_section's.
  void check_on_all(const std::string& what, const std::function<void()>& check);

  // This process's replicas among those that share the data, and a replica's number among them. After build and
  // compile.
  internal::LocalReplicas replicas() const { return unwrap(strategy).local_replicas(topology); }
  int number_of(const ReplicaContext& replica) const;

  // Where the variables are on parameter servers: this process among the others; else null.
  parameter_server::ServerCluster* servers() const { return unwrap(strategy).servers(); }

  // Brings the servers' values here, and, on the chief during a fit, what the workers have reported of their buffers.
  void fetch() const;
  void fetch_for_forward() const;  // as far as evaluation and prediction on this process need it

  // What act() returns; with parameter servers, on the chief, and then in all processes, which all make this call of
  // `name`. There the others call follow(number of the call), which waits for the outcome. Within fit, where the chief
  // is alone, act(). A chief that was started again does not act where the one before it had an outcome.
  template <class Result>
  Result on_chief(const std::string& name, const std::function<Result()>& act,
                  const std::function<std::string(std::int64_t)>& follow);

  // Collective over the workers. The chief reads the file for all workers, and writes what save_weights or save_state
  // returns. read_for_all does so in a section; the others belong into one.
  Archive read_for_all(const std::string& path);
  std::string read_on_all(const std::string& path) const;
  static Archive parse_read(const std::string& path, const std::string& bytes);
  void write_weights(const std::string& path) const;
  void write_checkpoint(const std::string& path);
  Archive save_weights() const;

  // What all save of a model that is split only the chief gets: its archive, on all workers. Else this one's.
  Archive from_chief(const Archive& archive) const;
  void load_weights(Archive archive, const LoadWeightsOptions& options = {});
  Archive save_state();
  void load_state(const Archive& archive, const std::function<void()>& load_others = {});

  // Checks all, changes nothing, and returns what changes the state to the archive's, which cannot fail.
  std::function<void()> change_to(const Archive& archive);

  // The full state, or the weights, without what is trained and the optimizer's state of that.
  Archive save_small(bool weights_only) const;

  // act(); with parameter servers on the chief alone, and, outside of fit, once however often that is started again.
  void once(const std::function<void()>& act) const;
  void load_past_fit();
  Archive with_own_variables(Archive archive) const;

  // The same, where parameter servers have the state, on the chief.
  void save_with_servers(const std::string& path);
  void load_with_servers(const std::string& path);
  void tell_workers() const;

  // The same without the callbacks' state. load_training changes nothing until the function that it returns is called,
  // which cannot fail.
  Archive save_training();
  void save_progress(Archive& archive) const;
  void save_replicas(Archive& archive) const;
  void save_callbacks(Archive& archive) const;
  std::function<void()> load_training(const Archive& archive);
  std::function<void()> load_progress(const Archive& archive);
  std::function<void()> load_callbacks(const Archive& archive) const;
  void count_uncounted();

  // Constant after construction.
  const Strategy strategy = Strategy::current();
  const train::ComputePolicy policy = train::ComputePolicy::current();
  const Make make;
  const Forward forward;
  const MakeLayers make_layers;

  std::shared_ptr<ReplicatedParameters> parameters;  // null before build
  std::unique_ptr<parallel::PipelineModel> stages;   // of a model that is cut into stages; else null
  std::optional<CompileOptions> compiled;
  Topology topology = unwrap(strategy).topology();  // with the optimizer's GradientRanks, once it is compiled
  std::shared_ptr<GradientPath> gradients;          // null before build or compile
  std::optional<train::Tracker> tracker;            // of the epoch that fit is in; likewise
  train::RecordedStep recorded;                     // of these gradients
  std::optional<train::CompiledModel> programs;     // likewise, where the strategy's devices run compiled programs
  std::optional<std::pair<Archive, LoadWeightsOptions>> pending_weights;
  std::vector<Layer> layers;            // of a Sequential
  std::optional<Layer> as_layer;        // the layer that it became: it is a part of another model since
  const std::int64_t model_number;      // among the models of this process, from 1
  std::vector<std::int64_t> built_for;  // the sizes of the batch, where it was built for one
  bool warned_of_context = false;
  mutable Example example;  // of zeros, for a step in which this worker has none

  std::uint64_t seed = next_random_seed();              // of the replicas' random numbers, with `steps`
  const std::uint64_t first_seed = next_random_seed();  // of the first values, whenever they are made
  std::string frozen;                                   // describe_frozen(), when it was last asked
  std::int64_t steps = 0;                               // train steps so far
  int part_of_step = 0;  // of the step, where several workers of parameter servers compute it
  StepTimes times;
  train::FitProgress progress;
  std::int64_t data_epochs = 0;        // epochs of data that fits have begun: the next one shuffles anew
  std::vector<AnyCallback> callbacks;  // of the fit that runs, as its options list them; empty between fits
  bool fitting = false;
  train::Training* training = nullptr;  // that runs: of a fit
  std::int64_t evaluated_step = -1;     // of an evaluator: that of the last checkpoint which it has evaluated
  std::int64_t call = 0;                // with parameter servers: the number of the one that the chief makes
  std::int64_t batches_of_call = 1;     // which callbacks' on_train_batch_end tells of: those of one execution
  bool stopping = false;                // this worker asked for the end of the fit
  bool out_of_data = false;             // stopping because the data ended: a longer data set would go on
  bool agreed_to_stop = false;          // one of the workers had asked when the last step or epoch ended

  // Whether one of the batches that on_train_batch_end tells of was a multiple of `every`, where `count` are done.
  bool passed_multiple(std::int64_t count, std::int64_t every) const {
    return every > 0 && count / every > (count - batches_of_call) / every;
  }

  static std::int64_t next_model_number();

  // Whether the fit ends after the step that was made.
  bool stops() const { return topology.peers.size() == 1 ? stopping : agreed_to_stop; }
};

template <class Result>
Result ModelImpl::on_chief(const std::string& name, const std::function<Result()>& act,
                           const std::function<std::string(std::int64_t)>& follow) {
  if (servers() == nullptr || fitting) return act();
  const auto number = servers()->next_call(name);
  if (!servers()->is_chief()) return train::parse<Result>(follow(number));
  if (const auto told = servers()->outcome_before_restart(number)) return train::parse<Result>(*told);
  call = number;
  try {
    const auto result = act();
    fetch();
    servers()->end(number, parameter_server::outcome_of(train::print(result)));
    return result;
  } catch (const std::exception& error) {
    servers()->end(number, parameter_server::outcome_of_failure(error.what()));
    throw;
  }
}

}  // namespace lockstep

namespace lockstep::train {

// As a C++ program writes it: "lockstep::EarlyStopping".
std::string name_of_type(const Callback& callback);

// Throws InvalidArgument naming everything in which the archive's tensors and the model's differ. Returns what the
// options pass over, after a warning that names that. Collective where the model is split.
std::set<std::string> check_weights(const Archive& archive, const ReplicatedParameters& parameters,
                                    const LoadWeightsOptions& options = {});

// Loads the archive's tensors into the model, but for those that the options pass over. Throws as check_weights;
// nothing has changed then.
void load_weights(const Archive& archive, const LoadWeightsOptions& options,
                  const std::shared_ptr<ReplicatedParameters>& parameters, const std::function<void()>& fetch = {});

}  // namespace lockstep::train
