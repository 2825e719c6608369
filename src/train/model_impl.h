// What is behind a Model.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradient/gradient_path.h"
#include "lockstep/base/random.h"
#include "lockstep/train/model.h"
#include "strategy/split.h"
#include "strategy/strategy_impl.h"
#include "train/mixed_precision.h"
#include "train/recorded_step.h"
#include "train/tracker.h"

namespace lockstep::train {

// How far a fit has come: what a full checkpoint needs besides the model to go on in the middle of an epoch.
struct FitProgress {
  int epoch = 0;           // that is running, or comes next
  std::int64_t batch = 0;  // steps done in it
  Position position;       // in the training data, in batches
  // The same in examples, for one that goes on with batches of another size: of the epoch's data (or of a worker's,
  // where each reads its own) so many have been used. Batches are of `batch_size` and begin at its multiples; 0: they
  // begin elsewhere. `readers`: how many workers read their own.
  std::int64_t examples = 0;
  std::int64_t batch_size = 0;
  int readers = 1;
  History history;
};

}  // namespace lockstep::train

namespace lockstep {

class ModelImpl {
 public:
  using Make = std::function<std::shared_ptr<torch::nn::Module>(const Example& sample)>;
  using Forward = std::function<Tensor(torch::nn::Module&, const Tensor&)>;

  ModelImpl(Make make_module, Forward forward_of) : make(std::move(make_module)), forward(std::move(forward_of)) {}

  // Makes the replicas for batches like `sample`, unless they are there. Takes weights that were loaded before.
  void build(const Example& sample);
  void make_gradient_path();
  void require_built(const char* caller) const;
  void require_compiled(const char* caller) const;
  void require_trainable() const;

  // A replica's forward. What LibTorch refuses is an InvalidArgument that names the batch.
  Tensor outputs_of(ReplicaContext& replica, const Example& part) const;

  // On each replica, with its part of the batch: forward, loss, backward, reduce and update, metrics.
  train::StepResult train_step(ReplicaContext& replica, const Example& part, train::Tracker& tracker);

  // Its forward, loss and backward.
  train::ComputedStep compute_gradients(ReplicaContext& replica, const Example& part, StepTimes& spent);

  // For jit_compile: what of a step can be recorded, and one step by playing it.
  train::ComputedStep enqueue_step(ReplicaContext& replica, const Example& batch);
  train::StepResult play_step(ReplicaContext& replica, const Example& part, train::Tracker& tracker);

  // One step on all replicas; what each found is for Tracker::add_batch.
  PerReplica<train::StepResult> train_batch(PerReplica<internal::Part>& batch, train::Tracker& tracker);

  const Communicator& workers() const { return unwrap(strategy).workers(); }

  // Who makes the same steps: the strategy's workers, or the ranks that came with the optimizer. After build and
  // compile.
  const Communicator& peers() const { return gradients->ranks(); }

  // Its number among the replicas that share the data.
  int number_of(const ReplicaContext& replica) const;

  // Collective over the workers. What the chief reads is all workers'; what is saved is for the chief to write.
  Archive read_for_all(const std::string& path) const;
  void load_weights(Archive archive);
  Archive save_state();
  void load_state(const Archive& archive);

  // The same without what callbacks keep. Loading changes nothing until what it returns is called, which cannot fail.
  Archive save_training();
  std::function<void()> load_training(const Archive& archive);

  // Constant after construction.
  const Strategy strategy = Strategy::current();
  const train::ComputePolicy policy = train::ComputePolicy::current();
  const Make make;
  const Forward forward;

  std::shared_ptr<ReplicatedParameters> parameters;  // null before build
  std::optional<CompileOptions> compiled;
  std::shared_ptr<GradientPath> gradients;  // null before build or compile
  std::optional<train::Tracker> tracker;    // of the epoch that fit is in; likewise
  train::RecordedStep recorded;             // of these gradients
  std::optional<Archive> pending_weights;

  std::uint64_t seed = next_random_seed();  // of the replicas' random numbers, with `steps`
  std::int64_t steps = 0;                   // train steps so far
  StepTimes times;
  train::FitProgress progress;
  std::int64_t data_epochs = 0;        // epochs of data that fits have begun: the next one shuffles anew
  std::vector<AnyCallback> callbacks;  // of the fit that runs, as its options list them; empty between fits
  bool fitting = false;
  bool stopping = false;        // this worker asked for the end of the fit
  bool out_of_data = false;     // that is why: a longer data set would go on
  bool agreed_to_stop = false;  // one of the workers did, before the last step or epoch ended

  // Whether the fit ends after the step that was made.
  bool stops() const { return peers().size() == 1 ? stopping : agreed_to_stop; }
};

}  // namespace lockstep

namespace lockstep::train {

// As a C++ program writes it: "lockstep::EarlyStopping".
std::string name_of_type(const Callback& callback);

// Throws InvalidArgument naming everything in which the archive's tensors and the model's differ.
void check_weights(const Archive& archive, const ReplicatedParameters& parameters);

}  // namespace lockstep::train
