// fit: epochs of steps, with callbacks around them.
#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>

#include "base/log.h"
#include "base/text.h"
#include "gradient/tensor_hash.h"
#include "lockstep/base/error.h"
#include "lockstep/cluster/cluster.h"
#include "strategy/split.h"
#include "strategy/strategy_impl.h"
#include "train/callbacks/progress_bar.h"
#include "train/fit_options.h"
#include "train/model_impl.h"
#include "train/signal_guard.h"

namespace lockstep {
namespace {

// How many processes ask to stop, have got SIGINT, and have got SIGTERM; and a number that no other sum is likely to
// have in its place.
struct Agreed {
  static constexpr double kMark = 0x5eed'1d'ea;
  double stopping = 0, interrupted = 0, terminated = 0, mark = kMark;
  std::span<double> all() { return {&stopping, 4}; }
};
static_assert(sizeof(Agreed) == 4 * sizeof(double));

class Fit {
 public:
  Fit(Model& model, const Dataset& data, const FitOptions& options)
      : model_(model), impl_(unwrap(model)), options_(options), data_(data), signals_(options.handle_signals) {
    impl_.fitting = true;
    if (!options.class_weight.empty()) {
      data_ = data_.map(
          [weights = options.class_weight](Example batch) { return train::weigh_by_class(std::move(batch), weights); });
    }
  }

  ~Fit() {
    each([](Callback& callback) { callback.detach(); });
    impl_.callbacks.clear();
    impl_.fitting = false;
  }
  Fit(const Fit&) = delete;
  Fit& operator=(const Fit&) = delete;

  History run() {
    impl_.data_epochs = std::max<std::int64_t>(impl_.data_epochs, options_.initial_epoch);
    impl_.progress = {.epoch = options_.initial_epoch, .position = {.epoch = impl_.data_epochs}};
    impl_.stopping = impl_.agreed_to_stop = impl_.out_of_data = false;
    workers().abort_on_error([this] { build_for_first_batch(); });
    peers().abort_on_error([this] {
      impl_.gradients->prepare();
      compare_workers();
      compare_options();
      attach_callbacks();
      train();
    });
    if (options_.steps_per_epoch > 0) ++impl_.data_epochs;  // all epochs of this fit came from one epoch of data
    return progress().history;
  }

 private:
  void train() {
    each([](Callback& callback) { callback.on_train_begin(); });  // BackupAndRestore changes the progress here
    agree();
    compare_states();
    // A training that was interrupted after a callback asked it to stop in the middle of an epoch still finishes that
    // epoch.
    while (progress().epoch < options_.epochs && (!stopping() || progress().batch > 0)) run_epoch();
    each([](Callback& callback) { callback.on_train_end(); });
  }

  train::FitProgress& progress() const { return impl_.progress; }

  // All agree on stopping after each step and epoch: if one worker stopped alone, the others would wait for it.
  bool stopping() const { return impl_.stops(); }
  Agreed mine() const {
    const int signal = signals_.received();
    return {impl_.stopping ? 1.0 : 0.0, signal == SIGINT ? 1.0 : 0.0, signal == SIGTERM ? 1.0 : 0.0};
  }
  void agree() {
    agreed_ = mine();
    peers().sum(agreed_.all());
    finish_agreement();
  }

  // Throws where another process was in a sum of something else.
  void finish_agreement() {
    if (agreed_.mark != Agreed::kMark * peers().size()) {
      throw InvalidArgument(
          "fit: the workers do not make the same calls; does a callback that only the chief calls (only_on_chief) "
          "save, evaluate or train a model?");
    }
    impl_.agreed_to_stop = agreed_.stopping > 0;
  }
  const Communicator& workers() const { return impl_.workers(); }
  const Communicator& peers() const { return impl_.peers(); }
  bool own_data() const { return impl_.gradients->own_data(); }

  // Whether other processes make the same steps in fits of their own, each with its own model.
  bool has_other_fits() const { return workers().size() == 1 && peers().size() > 1; }

  void compare_workers() const {
    if (own_data() || peers().size() == 1) return;
    const auto replicas = impl_.replicas();
    const auto first = strategy::first_element(data_, replicas);
    const auto policy = data_.options().auto_shard_policy;
    const bool own = strategy::reads_its_own(data_, replicas);  // then only the shape of an example must be the same
    const auto shape = [own](const Tensor& tensor) {
      return tensor.defined() ? text(own && tensor.dim() > 0 ? tensor.sizes().slice(1) : tensor.sizes()) : "none";
    };
    peers().check_all_agree(
        "fits",
        text("epochs ", options_.epochs, "\ninitial_epoch ", options_.initial_epoch, "\nsteps_per_epoch ",
             options_.steps_per_epoch, "\nauto_shard_policy ", static_cast<int>(policy), "\nbatches in the data set ",
             own ? 0 : data_.cardinality(), "\nfirst batch x ", shape(first.x), "\nfirst batch y ", shape(first.y),
             "\nfirst batch's contents (hash) ", first.x.defined() && !own ? gradient::hash_of(first.x) : 0));
  }

  void compare_options() const {
    if (!own_data()) return;
    peers().check_all_agree("fits", text("epochs ", options_.epochs, "\ninitial_epoch ", options_.initial_epoch,
                                         "\nsteps_per_epoch ", options_.steps_per_epoch));
  }

  // Compares the callbacks that all workers call, because these may save or evaluate the model together.
  void compare_callbacks() const {
    if (workers().size() == 1) return;
    std::string types;
    for (const auto& callback : options_.callbacks) {
      if (!callback->only_on_chief()) types += train::name_of_type(*callback.operator->()) + "\n";
    }
    workers().check_all_agree("callbacks", types);
  }

  // Where all workers must read the same batches, checks that they do: in the first step of each epoch, and as often as
  // their copies are compared.
  void compare_batches() const {
    const auto every = impl_.gradients->compare_copies_every();
    if (peers().size() == 1 || iterator_->is_sharded() || every == 0) return;
    if (progress().batch != 1 && impl_.steps % every != 0) return;
    peers().check_all_agree("data", text("a batch with the hash ", iterator_->element_hash(), " at step ",
                                         progress().batch, " of epoch ", progress().epoch + 1));
  }

  // Throws where ranks begin at different steps, as when one restored a checkpoint alone.
  void compare_states() const {
    if (!has_other_fits()) return;
    if (!own_data()) impl_.parameters->compare_copies(peers());
    peers().check_all_agree(
        "starting points (broadcast what one restored at the beginning of the training)",
        text("step ", model_.iterations(), "\nepoch ", impl_.progress.epoch, "\nbatch ", impl_.progress.batch));
  }

  void build_for_first_batch() {
    if (impl_.parameters == nullptr) {
      const auto first = strategy::first_element(data_, unwrap(impl_.strategy).local_replicas());
      if (!first.x.defined()) throw InvalidArgument("fit: the data set is empty");
      strategy::check_batch(first);
      impl_.build(first);
    }
    impl_.require_trainable();
    impl_.tracker->reset();
    warn_of_copies();
  }

  // Warns where a launcher started several processes that each train alone.
  void warn_of_copies() const {
    if (peers().size() > 1) return;
    try {
      const auto cluster = resolve_cluster();
      if (cluster.world.size == 1) return;
      log_warning(text("fit: ", cluster.source, " started ", cluster.world.size, " processes, and this one (rank ",
                       cluster.world.rank, ") trains a model of its own: MultiWorkerMirroredStrategy, or an ",
                       "optimizer that takes the other processes' gradients too, trains one together"));
    } catch (const ClusterError&) {
      // Wrong variables of a launcher do not matter to a process that trains alone.
    }
  }

  void attach_callbacks() {
    FitPlan plan{.epochs = options_.epochs, .steps = steps_of_an_epoch(), .verbose = options_.verbose};
    if (plan.verbose < 0) plan.verbose = train::is_terminal() ? 1 : 2;
    plan.validates = options_.validation_data.has_value();
    if (plan.verbose > 0) callbacks_.push_back(train::ProgressBar());
    callbacks_.insert(callbacks_.end(), options_.callbacks.begin(), options_.callbacks.end());
    compare_callbacks();
    if (workers().rank() != 0)
      std::erase_if(callbacks_, [](const AnyCallback& callback) { return callback->only_on_chief(); });
    std::stable_sort(callbacks_.begin(), callbacks_.end(),
                     [](const AnyCallback& a, const AnyCallback& b) { return a->order() < b->order(); });
    for (const auto& callback : callbacks_) callback->attach(model_, plan);
    impl_.callbacks = options_.callbacks;  // in the user's order, by which checkpoints identify them
  }

  std::int64_t steps_of_an_epoch() const {
    if (options_.steps_per_epoch == FitOptions::kEndless) return -1;
    if (options_.steps_per_epoch > 0) return options_.steps_per_epoch;
    const auto mine = std::max<std::int64_t>(-1, strategy::distribute(data_, impl_.replicas()).cardinality());
    return own_data() ? longest(mine) : mine;
  }

  // The steps of the longest of the ranks' epochs; -1 where a rank does not know its own.
  std::int64_t longest(std::int64_t steps) const {
    for (const auto& theirs : peers().all_gather(std::to_string(steps))) {
      const auto other = std::stoll(theirs);
      steps = std::min<std::int64_t>(steps, other) < 0 ? -1 : std::max<std::int64_t>(steps, other);
    }
    return steps;
  }

  void run_epoch() {
    const int epoch = progress().epoch;
    model_.module().train();
    each([&](Callback& callback) { callback.on_epoch_begin(epoch); });
    auto& iterator = open_data();
    while (!stopping() && (options_.steps_per_epoch == 0 || progress().batch < options_.steps_per_epoch)) {
      const auto before = std::chrono::steady_clock::now();
      auto batch = iterator.next_parts();
      impl_.times.input += std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
      if (!batch) break;
      run_batch(*batch, iterator.position());
    }
    if (progress().batch < options_.steps_per_epoch && !stopping()) stop_for_lack_of_data();
    if (progress().batch == 0 && !stopping()) throw InvalidArgument("fit: the data set yielded no batch");
    if (progress().batch == 0) return;  // stopped before its first step
    finish_epoch(epoch);
    throw_if_interrupted();
  }

  // With steps_per_epoch, one iterator serves all epochs.
  DistributedIterator& open_data() {
    if (iterator_ && options_.steps_per_epoch > 0) return *iterator_;
    const auto data = strategy::distribute_ahead(data_, impl_.replicas());
    if (restored_with_other_batch_size(data)) {
      iterator_.emplace(data.iterate_from({progress().position.epoch, progress().examples}));
      progress().batch_size = 0;
    } else {
      iterator_.emplace(data.iterate(progress().position));
    }
    examples_before_ = progress().examples;
    return *iterator_;
  }

  // Whether the restored position counts batches of another size, so that it must be found by examples. Throws where it
  // cannot be found in this data.
  bool restored_with_other_batch_size(const DistributedDataset& data) {
    const auto local = impl_.replicas();
    const int readers = data.is_sharded() ? local.workers.size() : 1;
    auto& now = progress();
    const int readers_then = std::exchange(now.readers, readers);
    if (now.position.index == 0) {
      now.batch_size = 0;  // set after the first step
      return false;
    }
    if (readers != readers_then) {
      throw InvalidArgument(
          text("fit: the checkpoint was made in the middle of an epoch in which ", workers_that_read(readers_then),
               ", and now ", workers_that_read(readers), ", so that some examples would be left out and others come ",
               "twice; go on with as many workers and the same auto_shard_policy, or, without steps_per_epoch, from ",
               "the end of an epoch"));
    }
    if (own_data()) return false;  // each rank has batches and a position of its own
    const auto size = largest_of_readers(strategy::first_element(data_, local, now.position.epoch).size());
    if (size == now.batch_size) return false;
    if (readers > 1) {
      throw InvalidArgument(text("fit: the checkpoint was made with batches of ", now.batch_size, " examples, and now ",
                                 "they have ", size, "; where each of ", readers, " workers reads its own, the place ",
                                 "in the data cannot be found: go on with batches of ", now.batch_size,
                                 ", or, without steps_per_epoch, from the end of an epoch"));
    }
    if (options_.steps_per_epoch == 0 && size > 0) now.batch = (now.examples + size - 1) / size;
    return true;
  }

  // The largest size on any worker: where workers read their own batches, one may have less than a full batch.
  std::int64_t largest_of_readers(std::int64_t size) const {
    if (progress().readers == 1) return size;
    for (const auto& theirs : peers().all_gather(std::to_string(size)))
      size = std::max<std::int64_t>(size, std::stoll(theirs));
    return size;
  }

  static std::string workers_that_read(int readers) {
    return readers == 1 ? "all workers read the same batches" : text(readers, " workers read batches of their own");
  }

  void run_batch(PerReplica<internal::Part>& batch, Position position_after) {
    const auto index = progress().batch;
    each([&](Callback& callback) { callback.on_train_batch_begin(index); });
    const auto results = impl_.train_batch(batch, *impl_.tracker);
    agreed_ = mine();
    impl_.tracker->add_batch(results, agreed_.all());
    if (has_other_fits()) peers().sum(agreed_.all());
    finish_agreement();
    progress().batch = index + 1;
    if (progress().position.index == 0) progress().batch_size = largest_of_readers(iterator_->element_size());
    progress().position = position_after;
    progress().examples = examples_before_ + iterator_->examples();
    compare_batches();
    const auto logs = impl_.tracker->logs();
    each([&](Callback& callback) { callback.on_train_batch_end(index, logs); });
    throw_if_interrupted();
  }

  // After a whole step or epoch. Every callback may save, also when another one fails to.
  void throw_if_interrupted() {
    const int signal = peers().size() == 1       ? signals_.received()
                       : agreed_.terminated > 0  ? SIGTERM
                       : agreed_.interrupted > 0 ? SIGINT
                                                 : 0;
    if (signal == 0) return;
    each([](Callback& callback) {
      try {
        callback.on_interrupt();
      } catch (const std::exception& error) {
        log_warning(text("a callback could not save at the interruption: ", error.what()));
      }
    });
    throw Interrupted(signal);
  }

  void stop_for_lack_of_data() {
    if (progress().batch == 0 && progress().history.epoch.empty()) throw InvalidArgument("fit: the data set is empty");
    log_warning(text("fit: the data set ended after ", progress().batch, " of ", options_.steps_per_epoch,
                     " steps of epoch ", progress().epoch + 1, "; call repeat() on it to train longer"));
    impl_.stopping = impl_.agreed_to_stop = impl_.out_of_data = true;
  }

  void finish_epoch(int epoch) {
    auto logs = impl_.tracker->logs();
    if (options_.validation_data && (epoch + 1) % options_.validation_freq == 0) {
      const auto result = validate();
      for (const auto& [name, value] : result) logs.set("val_" + name, value);
    }
    each([&](Callback& callback) { callback.on_epoch_logs(epoch, logs); });
    auto& history = progress().history;
    history.epoch.push_back(epoch);
    for (const auto& [name, value] : logs) history.history[name].push_back(value);

    // A checkpoint that is saved from here on continues with the next epoch.
    impl_.tracker->reset();
    progress().epoch = epoch + 1;
    progress().batch = 0;
    if (options_.steps_per_epoch == 0) {
      progress().position = {.epoch = ++impl_.data_epochs};
      progress().examples = 0;
    }
    each([&](Callback& callback) { callback.on_epoch_end(epoch, logs); });
    agree();
  }

  Logs validate() {
    each([](Callback& callback) { callback.on_test_begin(); });
    const auto logs = model_.evaluate(*options_.validation_data, {.steps = options_.validation_steps});
    each([&](Callback& callback) { callback.on_test_end(logs); });
    return logs;
  }

  template <class Call>
  void each(const Call& call) {
    for (const auto& callback : callbacks_) call(*callback.operator->());
  }

  Model& model_;
  ModelImpl& impl_;
  const FitOptions& options_;
  Dataset data_;
  train::SignalGuard signals_;
  Agreed agreed_;
  std::vector<AnyCallback> callbacks_;  // in the order of their calls
  std::optional<DistributedIterator> iterator_;
  std::int64_t examples_before_ = 0;  // of the epoch's data, before iterator_ began
};

}  // namespace

History Model::fit(const Dataset& data, const FitOptions& options) {
  impl_->require_compiled("fit");
  if (impl_->fitting) throw InvalidArgument("fit: this model is in a fit already; a callback of it cannot call fit");
  train::check_fit_options(data, options);
  return Fit(*this, data, options).run();
}

}  // namespace lockstep
