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
#include "lockstep/train/model.h"
#include "strategy/strategy_impl.h"
#include "train/execution.h"
#include "train/layers/stack.h"
#include "train/lead.h"
#include "train/mixed_precision.h"
#include "train/model_state.h"

namespace lockstep::train {

class Training;

// How a model's module is made, and what other models know of it.
struct Definition {
  std::function<std::shared_ptr<torch::nn::Module>(const Example& sample)> make;
  std::function<Tensor(torch::nn::Module&, const Tensor&)> forward;
  std::function<Layers(const Example& sample)> make_layers = {};  // where it can be cut into stages
  std::vector<Layer> layers = {};                                 // a Sequential's
  std::optional<Layer> as_layer = {};   // the layer that it became, as a part of another model
  std::int64_t number = next_number();  // among the models of this process, from 1

  static std::int64_t next_number();
};

// The fit that runs, or ran last.
struct CurrentFit {
  Training* training = nullptr;      // null: no fit runs
  std::int64_t batches_of_call = 1;  // the batches of one execution, of which on_train_batch_end tells
  bool stopping = false;             // this worker asked for the end of the fit
  bool out_of_data = false;          // stopping because the data ended: a longer data set would go on
  bool agreed_to_stop = false;       // one of the workers had asked when the last step or epoch ended

  // Returns true where a batch that on_train_batch_end tells of was a multiple of `every`, where `count` are done.
  bool passed_multiple(std::int64_t count, std::int64_t every) const {
    return every > 0 && count / every > (count - batches_of_call) / every;
  }
};

}  // namespace lockstep::train

namespace lockstep {

class ModelImpl {
 public:
  explicit ModelImpl(train::Definition of_module) : definition(std::move(of_module)) {}

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

  // Calls Workers::check_on_all, over topology.peers.
  void check_on_all(const std::function<void()>& check);

  // Return this process's replicas among those that share the data, and a replica's number among them. Call them after
  // build and compile.
  internal::LocalReplicas replicas() const { return unwrap(strategy).replicas().among(topology); }
  int number_of(const ReplicaContext& replica) const;

  // Returns true where the fit ends after the step that was made.
  bool stops() const { return topology.peers.size() == 1 ? fit.stopping : fit.agreed_to_stop; }

  // Constant after construction.
  const Strategy strategy = Strategy::current();
  const train::ComputePolicy policy = train::ComputePolicy::current();
  const std::shared_ptr<train::Lead> lead = train::Lead::of(*this);

  train::ModelState state{*this};
  train::Definition definition;
  train::CurrentFit fit;

  std::shared_ptr<ReplicatedParameters> parameters;  // null before build
  std::shared_ptr<train::Execution> execution;       // null before build
  std::optional<CompileOptions> compiled;
  Topology topology = unwrap(strategy).topology();  // with the optimizer's GradientRanks, once it is compiled
  std::shared_ptr<GradientPath> gradients;          // null before build or compile
  std::vector<std::int64_t> built_for;              // the sizes of the batch, where it was built for one
  std::string frozen;                               // describe_frozen(), when it was last called
  int part_of_step = 0;  // its part, where several workers of parameter servers compute a step
  StepTimes times;
};

}  // namespace lockstep

namespace lockstep::train {

// Returns the type's name as a C++ program writes it: "lockstep::EarlyStopping".
std::string name_of_type(const Callback& callback);

// Throws InvalidArgument naming all differences between the archive's tensors and the model's. Returns the variables
// that the options pass over, after a warning that names them. Collective where the model is split.
std::set<std::string> check_weights(const Archive& archive, const ReplicatedParameters& parameters,
                                    const LoadWeightsOptions& options = {});

// Returns what loads the archive's tensors into the model, but for those that the options pass over: before that it
// calls `fetch`, where there are some. Throws as check_weights.
std::function<void()> change_weights(const Archive& archive, const LoadWeightsOptions& options,
                                     const std::shared_ptr<ReplicatedParameters>& parameters,
                                     const std::function<void()>& fetch = {});

}  // namespace lockstep::train
