// A model's state: what training changes, and what a training goes on from.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/sharded_archive.h"
#include "lockstep/base/random.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/train/model.h"
#include "train/tracker.h"

namespace lockstep {
class ModelImpl;
}

namespace lockstep::train {

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

// A file that a save makes.
struct StateFile {
  std::string path;
  bool weights_only = false;  // else a full checkpoint

  // Rank 0's work before and after the file appears; null: none. Servers that write the file leave it out.
  std::function<void(const std::function<void()>& write)> around = {};

  // Calls write(), on rank 0, which makes the file.
  template <class Write>
  void make(const Write& write) const {
    around ? around(write) : write();
    if (!weights_only) checkpoint::remove_rows(path);  // of a checkpoint that was made with parameter servers
  }
};

// One thread, while no replica runs.
//
// A selection is a Trackable of some parts of the state, for archives without another prefix. Saving one is collective,
// in a section, and so is loading one where the model is split; but for of_fit and beside_servers.
//
// These take a selection:
// - Lead::write makes one file of rank 0's, or, with parameter servers, the chief's and theirs (train/lead.h).
// - SharedSave makes one file that several workers write while they train on (train/callbacks/background_save.h).
// - print_state makes bytes, which parse_state loads on another rank (checkpoint/state.h).
class ModelState {
 public:
  // Prefixes in a full checkpoint: the optimizer's state, the callbacks', and replicas' buffers.
  static constexpr const char *kOptimizer = "optimizer", *kCallback = "callback", *kReplica = "replica";

  // `impl` must outlive this.
  explicit ModelState(ModelImpl& impl) : impl_(impl) {}

  // --- selections. The model is built, and compiled for all but weights.

  Trackable weights() const;                   // variables and buffers
  Trackable training();                        // a full checkpoint without the callbacks' state
  Trackable all();                             // a full checkpoint
  Trackable of_file(bool weights_only);        // `weights`, or `all`
  Trackable small_of_file(bool weights_only);  // of_file without trained parameters, and the optimizer's state for them
  Trackable of_fit();                          // progress and callbacks
  Trackable beside_servers();                  // seed, frozen parameters and buffers

  // --- sources

  // Reads a file for all workers, in a section.
  Archive read(const std::string& path) const;

  // Reads a full checkpoint for all workers, in a section. Returns the change to its state, without servers.
  std::function<void()> read_all(const std::string& path);

  // Returns the chief's archive on all workers where the model is split, since only it has all; else `archive`.
  // Collective.
  Archive from_chief(const Archive& archive) const;

  // Loads the weights now, or when the model is built.
  void load_weights(Archive archive, const LoadWeightsOptions& options = {});

  std::uint64_t seed = next_random_seed();              // random numbers of the replicas follow from it and `steps`
  const std::uint64_t first_seed = next_random_seed();  // the first values follow from it, whenever they are made
  std::int64_t steps = 0;                               // train steps so far
  FitProgress progress;
  std::int64_t data_epochs = 0;        // epochs of data that fits have begun: the next one shuffles anew
  std::optional<Tracker> tracker;      // the one of the epoch that fit is in; null before build or compile
  std::vector<AnyCallback> callbacks;  // those of the fit that runs, as its options list them; else empty
  std::optional<std::pair<Archive, LoadWeightsOptions>> pending_weights;  // loaded before build

 private:
  Trackable variables() const;
  Trackable optimizer() const;
  Trackable fit_progress();
  Trackable place();
  Trackable replicas() const;
  Trackable state_of_callbacks() const;
  void count_uncounted();

  ModelImpl& impl_;
};

}  // namespace lockstep::train
