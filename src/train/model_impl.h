// The implementation of a Model.
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
#include "strategy/strategy_impl.h"
#include "train/execution.h"
#include "train/layers_module.h"
#include "train/lead.h"
#include "train/mixed_precision.h"
#include "train/tracker.h"

namespace lockstep::train {

class Training;

// How far a fit has come: what a full checkpoint needs besides the model to go on in the middle of an epoch.
struct FitProgress {
  int epoch = 0;           // the epoch that runs, or comes next
  std::int64_t batch = 0;  // steps done in the epoch
  Position position;       // the position in the training data, in batches
  // For going on with batches of another size, the position in examples: how many of the epoch's examples have been
  // used (a worker's examples, where each reads its own). Batches have `batch_size` examples and begin at its
  // multiples; 0: they begin elsewhere. `readers`: how many workers read their own data.
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
  // Prefixes in a full checkpoint: the optimizer's state, the callbacks', and replicas' buffers.
  static constexpr const char *kOptimizer = "optimizer", *kCallback = "callback", *kReplica = "replica";

  using Make = std::function<std::shared_ptr<torch::nn::Module>(const Example& sample)>;
  using Forward = std::function<Tensor(torch::nn::Module&, const Tensor&)>;

  using MakeLayers = std::function<train::Layers(const Example& sample)>;

  // `layers_of`: given where the model is made of layers, which can be cut into stages.
  ModelImpl(Make make_module, Forward forward_of, MakeLayers layers_of = {})
      : make(std::move(make_module)),
        forward(std::move(forward_of)),
        make_layers(std::move(layers_of)),
        model_number(next_model_number()) {}

  // Makes the replicas for batches like `sample`, unless they are there. Applies weights that were loaded before.
  void build(const Example& sample);

  // Builds for the batches of a data set; `caller` begins the error where it is empty. Where a worker cannot build, the
  // others are told.
  void build_for(const Dataset& data, const char* caller);
  void make_gradient_path();
  void require_built(const char* caller) const;
  void require_own(const char* caller) const;  // throws InvalidArgument for a part of another model
  void require_compiled(const char* caller) const;
  void require_trainable() const;

  // Called before a fit, an epoch or a step: replica 0's requires_grad holds for all replicas from now on. Throws
  // InvalidArgument for a parameter of which the optimizer has no state: it was frozen when the model was compiled.
  void follow_requires_grad();

  // Calls act(), which is collective over the workers. With an elastic strategy the call is a section
  // (elastic/sections.h): act() is called again where a worker is lost meanwhile. Returns its numbers, which are equal
  // on all workers. `what`: names the call in messages, where no fit runs.
  using Numbers = std::vector<double>;
  Numbers in_section(const std::string& what, const std::function<Numbers()>& act);

  // Calls an act() that each worker does for itself: where it returns on one worker, all have completed it.
  template <class Act>
  void on_all_in_section(const std::string& what, const Act& act) {
    in_section(what, [&] {
      act();
      if (unwrap(strategy).workers().is_elastic()) topology.all.any(false);
      return Numbers();
    });
  }

  // Does what collective::check_on_all does, over topology.peers. `what`: as in_section's.
  void check_on_all(const std::string& what, const std::function<void()>& check);

  // Return this process's replicas among those that share the data, and a replica's number among them. Call them after
  // build and compile.
  internal::LocalReplicas replicas() const { return unwrap(strategy).local_replicas(topology); }
  int number_of(const ReplicaContext& replica) const;

  // Collective over the workers. The chief reads the file for all workers, and writes the archive of save_weights or
  // save_state. read_for_all reads in a section; call the others in one.
  Archive read_for_all(const std::string& path);
  std::string read_on_all(const std::string& path) const;
  static Archive parse_read(const std::string& path, const std::string& bytes);
  void write_weights(const std::string& path) const;
  Archive save_weights() const;

  // Returns the chief's archive on all workers where the model is split, since only it has all; else `archive`.
  Archive from_chief(const Archive& archive) const;
  void load_weights(Archive archive, const LoadWeightsOptions& options = {});
  Archive save_state();
  void load_state(const Archive& archive, const std::function<void()>& load_others = {});

  // Checks all, and changes nothing. Returns a function that gives the model the archive's state, and cannot fail.
  std::function<void()> change_to(const Archive& archive);

  // Returns the full state, or the weights, without the trained parameters and their optimizer state.
  Archive save_small(bool weights_only) const;

  // Save and load the full state without the callbacks'. load_training changes nothing until the function that it
  // returns is called, which cannot fail.
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
  const std::shared_ptr<train::Lead> lead = train::Lead::of(*this);

  std::shared_ptr<ReplicatedParameters> parameters;  // null before build
  std::shared_ptr<train::Execution> execution;       // null before build
  std::optional<CompileOptions> compiled;
  Topology topology = unwrap(strategy).topology();  // with the optimizer's GradientRanks, once it is compiled
  std::shared_ptr<GradientPath> gradients;          // null before build or compile
  std::optional<train::Tracker> tracker;            // the one of the epoch that fit is in; null likewise
  std::optional<std::pair<Archive, LoadWeightsOptions>> pending_weights;
  std::vector<Layer> layers;            // a Sequential's
  std::optional<Layer> as_layer;        // the layer that it became, as a part of another model
  const std::int64_t model_number;      // among the models of this process, from 1
  std::vector<std::int64_t> built_for;  // the sizes of the batch, where it was built for one

  std::uint64_t seed = next_random_seed();              // random numbers of the replicas follow from it and `steps`
  const std::uint64_t first_seed = next_random_seed();  // the first values follow from it, whenever they are made
  std::string frozen;                                   // describe_frozen(), when it was last called
  std::int64_t steps = 0;                               // train steps so far
  int part_of_step = 0;  // its part, where several workers of parameter servers compute a step
  StepTimes times;
  train::FitProgress progress;
  std::int64_t data_epochs = 0;        // epochs of data that fits have begun: the next one shuffles anew
  std::vector<AnyCallback> callbacks;  // those of the fit that runs, as its options list them; else empty
  bool fitting = false;
  train::Training* training = nullptr;  // the training that a fit runs
  std::int64_t evaluated_step = -1;     // an evaluator's: the step of the last checkpoint that it evaluated
  std::int64_t batches_of_call = 1;     // the batches of one execution, of which on_train_batch_end tells
  bool stopping = false;                // this worker asked for the end of the fit
  bool out_of_data = false;             // stopping because the data ended: a longer data set would go on
  bool agreed_to_stop = false;          // one of the workers had asked when the last step or epoch ended

  // Returns true where a batch that on_train_batch_end tells of was a multiple of `every`, where `count` are done.
  bool passed_multiple(std::int64_t count, std::int64_t every) const {
    return every > 0 && count / every > (count - batches_of_call) / every;
  }

  static std::int64_t next_model_number();

  // Returns true where the fit ends after the step that was made.
  bool stops() const { return topology.peers.size() == 1 ? stopping : agreed_to_stop; }
};

}  // namespace lockstep

namespace lockstep::train {

// Returns the type's name as a C++ program writes it: "lockstep::EarlyStopping".
std::string name_of_type(const Callback& callback);

// Throws InvalidArgument naming all differences between the archive's tensors and the model's. Returns the variables
// that the options pass over, after a warning that names them. Collective where the model is split.
std::set<std::string> check_weights(const Archive& archive, const ReplicatedParameters& parameters,
                                    const LoadWeightsOptions& options = {});

// Loads the archive's tensors into the model, but for those that the options pass over. Throws as check_weights, and
// has changed nothing then.
void load_weights(const Archive& archive, const LoadWeightsOptions& options,
                  const std::shared_ptr<ReplicatedParameters>& parameters, const std::function<void()>& fetch = {});

}  // namespace lockstep::train
